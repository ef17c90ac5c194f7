"""The set-up scripts, in a copy with its own PATH: Python and Pulumi, checks of downloads, messages."""

from __future__ import annotations

import hashlib
import io
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from waiting import limit

SETUP = Path(__file__).resolve().parents[2] / "setup"
LEAST = "3.250.0"
BASE = "/usr/bin:/bin"
OF_THE_CHECKOUT = "the stacks of this checkout have the passphrase in .pulumi-state/passphrase"


def test_one_version_of_pulumi() -> None:
    """What is required of a user's own is what is pinned, built and told to Pulumi itself."""
    root = SETUP.parent
    assert f"least_pulumi={LEAST}\n" in (SETUP / "common.sh").read_text()
    assert f'requiredPulumiVersion: ">={LEAST}"\n' in (root / "Pulumi.yaml").read_text()
    assert f"\npulumi=={LEAST}\n" in (root / "constraints.txt").read_text()
    assert f"github.com/pulumi/pulumi/pkg/v3 v{LEAST}\n" in (SETUP / "pulumi/go.mod").read_text()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout that has only the set-up scripts, and bin/ for the programs that it finds."""
    (root := tmp_path / "checkout").joinpath("bin").mkdir(parents=True)
    shutil.copytree(SETUP, root / "setup", ignore=shutil.ignore_patterns("go.*", "*.go"))
    program(root / "bin" / "python3", f'exec {sys.executable} "$@"')
    return root


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def sh(root: Path, *command: str, path: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{path}{root}/bin:{BASE}", "HOME": str(root), **env}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit(), check=False)


def common(root: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return sh(root, "sh", "-euc", f"part=test; . setup/common.sh; {script}", **env)


def test_which_version_is_enough(checkout: Path) -> None:
    enough = ["3.250.0 3.250.0", "3.251.0-alpha.1 3.250.0", "4.0.0 3.250.0", "1.26 1.25.11"]
    too_old = ["3.99.9 3.250.0", "1.25.9 1.25.11"]
    script = "; ".join(f"if newer {pair}; then echo {pair}; fi" for pair in [*enough, *too_old])
    assert common(checkout, script).stdout.splitlines() == enough


def test_the_first_python_that_fits(checkout: Path) -> None:
    program(checkout / "bin" / "python3.11", "exit 1")  # as pyenv's, where that version is not chosen
    program(checkout / "bin" / "python3.12", "exit 0")
    assert common(checkout, "find_python; echo $python").stdout == "python3.12\n"
    mine = program(checkout / "mine", "exit 0")
    assert common(checkout, "find_python; echo $python", PYTHON=str(mine)).stdout == f"{mine}\n"


def test_without_a_python_that_fits(checkout: Path) -> None:
    ran = common(checkout, "find_python || fail none", PYTHON="/nowhere/python")
    assert (ran.returncode, ran.stderr) == (2, "test: none\n")


def choose(root: Path, **env: str) -> subprocess.CompletedProcess[str]:
    nowhere = (root / "nowhere").as_uri()
    return sh(root, "setup/pulumi-cli.sh", **{"PULUMI_DOWNLOADS": nowhere, "PULUMI_SUMS": f"{nowhere}/sums", **env})


def chosen(root: Path) -> str:
    return (root / ".cache/pulumi/cli").read_text().strip()


def test_a_users_own_pulumi_comes_first(checkout: Path) -> None:
    own = program(checkout / "bin/pulumi", "echo v3.260.1")
    # Another checkout's wrapper is no Pulumi of the user's own.
    (venv := checkout / "other/bin").mkdir(parents=True)
    program(checkout / "other/setup/pulumi.sh", "echo v9.0.0")
    (venv / "pulumi").symlink_to("../setup/pulumi.sh")
    ran = choose(checkout, path=f"{venv}:")
    assert (ran.returncode, ran.stdout) == (0, f"pulumi: your own, {own} (v3.260.1)\n")
    assert chosen(checkout) == str(own)
    assert choose(checkout, SETUP_TOGETHER="60").stdout == "", "nothing has changed"


def release(folder: Path, version: str) -> tuple[str, str]:
    """Make a release of Pulumi as it is published; return its address, and its sums."""
    folder.mkdir()
    system = {"Linux": "linux", "Darwin": "darwin"}[platform.system()]
    machine = {"x86_64": "x64"}.get(platform.machine(), "arm64")
    archive = folder / f"pulumi-v{version}-{system}-{machine}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("pulumi", "pulumi-resource-pulumi-python"):
            content = f"#!/bin/sh\necho v{version}\n".encode()
            (member := tarfile.TarInfo(f"pulumi/{name}")).mode = 0o755
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    (sums := folder / "sums").write_text(f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive.name}\n")
    return folder.as_uri(), sums.as_uri()


def test_where_ones_own_is_old_the_download_is_taken(checkout: Path) -> None:
    own = program(checkout / "bin/pulumi", "echo v3.99.0")
    downloads, sums = release(checkout / "release", LEAST)
    ran = choose(checkout, PULUMI_DOWNLOADS=downloads, PULUMI_SUMS=sums)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"(v3.99.0, {own})" in ran.stdout
    assert re.fullmatch(rf"pulumi: v{LEAST}, Pulumi's download, \d+ s", ran.stdout.splitlines()[-1])
    assert chosen(checkout) == str(checkout / ".cache/pulumi/pulumi")
    again = choose(checkout)
    assert again.stdout.splitlines()[-1] == f"pulumi: v{LEAST} is there"


def test_a_download_that_is_not_what_was_published_is_not_used(checkout: Path) -> None:
    downloads, sums = release(checkout / "release", LEAST)
    (checkout / "release/sums").write_text(re.sub("^.", "x", (checkout / "release/sums").read_text()))
    ran = choose(checkout, PULUMI_DOWNLOADS=downloads, PULUMI_SUMS=sums)
    assert ran.returncode == 2
    assert "is not what was published" in ran.stderr
    assert "no Go 1.25.11 or later to build it" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert not list((checkout / ".cache/pulumi").glob("*pulumi*"))


def test_a_download_that_cannot_be_unpacked_is_not_used(checkout: Path) -> None:
    downloads, sums = release(checkout / "release", LEAST)
    (archive,) = (checkout / "release").glob("*.tar.gz")
    archive.write_bytes(archive.read_bytes()[:99])
    (checkout / "release/sums").write_text(f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive.name}\n")
    ran = choose(checkout, PULUMI_DOWNLOADS=downloads, PULUMI_SUMS=sums)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert f"{archive.name} cannot be unpacked" in ran.stderr
    assert not (checkout / ".cache/pulumi/cli").exists()
    assert not list((checkout / ".cache/pulumi").glob("*.tar.gz"))


def test_a_build_leaves_out_unused_files(checkout: Path) -> None:
    """Go builds from a copy of the module, also in a folder with a space, and only Go's own library is optimized."""
    root = checkout.rename(checkout.with_name("check out"))
    modules = root / "modules"
    spec = 'import (\n\t"sort"\n\t"github.com/pb33f/libopenapi"\n)\nfunc LoadIndex() {}\n'
    spec += "func parseIndex() {\n}\n\nfunc other() {\n}\n"
    schema = "func mdInline() {\n}\n\nfunc schemaType() {\n}\n\nfunc markdownEnumTail() {\n}\n"
    for file, text in {
        "cli/cmd/pulumi/cloud/spec.go": spec,
        "cli/cmd/pulumi/cloud/schema.go": schema,
        "storage/grpc_dp_diag.go": '_ "google.golang.org/grpc/balancer/rls"\nkept\n',
        "sdk/python/cmd/pulumi-language-python-exec": "",
        "sdk/python/dist/pulumi-resource-pulumi-python": "",
    }.items():
        (modules / file).parent.mkdir(parents=True, exist_ok=True)
        (modules / file).write_text(text)
    for folder in ("pulumi", "language-python"):
        for name in ("go.mod", "go.sum"):
            (root / "setup" / folder / name).touch()
    program(
        root / "bin/go",
        f"""for last; do :; done
case $1 in
  env) echo go1.26.0 ;;
  mod) echo "$@" >>"{root}/go.log" ;;
  list) case " $* " in
      *" -m "*/pkg/v3*) echo "{modules}/cli" ;;
      *" -m "*storage*) echo "{modules}/storage" ;;
      *" -m "*) echo "{modules}/sdk" ;;
    esac ;;
  build)
    echo "$@" >>"{root}/go.log"
    [ ! -d ../../.cache/pulumi/source ] || cp -R ../../.cache/pulumi/source "{root}/patched"
    while [ "$1" != -o ]; do shift; done
    printf '#!/bin/sh\\necho v{LEAST}\\n' >"$2"
    chmod +x "$2" ;;
esac""",
    )
    ran = choose(root)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.fullmatch(rf"pulumi: v{LEAST}, built by go1.26.0, \d+ s", ran.stdout.splitlines()[-1])
    replaced, cli, host = (root / "go.log").read_text().splitlines()
    assert "-replace github.com/pulumi/pulumi/pkg/v3=../../.cache/pulumi/source/cli" in replaced
    assert " -modfile=../../.cache/pulumi/source/go.mod -tags=disable_grpc_modules " in cli
    assert "-modfile" not in host
    for built in (cli, host):
        assert " -gcflags=all=-N -l -dwarf=false -gcflags=std=-dwarf=false " in built
    patched = (root / "patched/cli/cmd/pulumi/cloud/spec.go").read_text()
    assert "libopenapi" not in patched
    functions = ["LoadIndex() {}", "parseIndex([]byte) (*Index, error) {", "mdInline() {", "markdownEnumTail() {"]
    assert re.findall(r"func (.*)", patched) == functions
    assert (root / "patched/storage/grpc_dp_diag.go").read_text() == "kept\n"
    assert not (root / ".cache/pulumi/source").exists()


def test_the_wrapper_runs_what_was_chosen(checkout: Path) -> None:
    program(checkout / "bin/pulumi", 'echo v3.300.0 "$PULUMI_CONFIG_PASSPHRASE_FILE" "$@"')
    choose(checkout)
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/pulumi").symlink_to("../../setup/pulumi.sh")
    (link := checkout / "mine").symlink_to(".venv/bin/pulumi")
    for called in (checkout / ".venv/bin/pulumi", link):
        assert sh(checkout, str(called), "up").stdout == f"v3.300.0 {checkout}/.pulumi-state/passphrase up\n"
    (checkout / "bin/pulumi").unlink()
    ran = sh(checkout, ".venv/bin/pulumi", "up")
    assert (ran.returncode, ran.stderr) == (2, f"pulumi: {checkout}/bin/pulumi is not there: run `make pulumi`\n")


def wrapper(root: Path, cwd: Path | None = None, **env: str) -> tuple[list[str], str]:
    """Return what the wrapper's Pulumi sees, passphrase, its file and the state, and the wrapper's output."""
    shown = (
        'echo "${PULUMI_CONFIG_PASSPHRASE-unset}"; echo "${PULUMI_CONFIG_PASSPHRASE_FILE-unset}"; echo "${PULUMI_BACKEND_URL-}"'
    )
    program(root / "bin/pulumi", f"[ $1 != version ] || {{ echo v3.300.0; exit; }}\n{shown}")
    choose(root)
    (root / ".venv/bin").mkdir(parents=True, exist_ok=True)
    if not (link := root / ".venv/bin/pulumi").is_symlink():
        link.symlink_to("../../setup/pulumi.sh")
    script = f"cd {cwd or root} && exec {link} up"
    ran = sh(root, "sh", "-c", script, **env)
    return ran.stdout.splitlines(), ran.stderr


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({"PULUMI_CONFIG_PASSPHRASE": ""}, "PULUMI_CONFIG_PASSPHRASE"),
        ({"PULUMI_CONFIG_PASSPHRASE": "another"}, "PULUMI_CONFIG_PASSPHRASE"),
        ({"PULUMI_CONFIG_PASSPHRASE_FILE": "/nowhere"}, "PULUMI_CONFIG_PASSPHRASE_FILE"),
        ({"PULUMI_CONFIG_PASSPHRASE": "", "PULUMI_BACKEND_URL": "file://./.pulumi-state"}, "PULUMI_CONFIG_PASSPHRASE"),
        ({"PULUMI_CONFIG_PASSPHRASE": "secret"}, ""),
        ({"PULUMI_CONFIG_PASSPHRASE_FILE": ".pulumi-state/passphrase"}, ""),
        ({}, ""),
    ],
)
def test_the_passphrase_of_the_checkout_goes_before_others(checkout: Path, given: dict[str, str], unused: str) -> None:
    state_of(checkout).mkdir()
    (own := checkout / ".pulumi-state/passphrase").write_text("secret\n")
    seen, said = wrapper(checkout, **given)
    assert seen[:2] == ["unset", str(own)]
    line = f"pulumi: {unused} is not used: {OF_THE_CHECKOUT}\n"
    assert said == (line if unused else "")


def test_no_stack_is_sealed_with_an_empty_passphrase(checkout: Path) -> None:
    own = checkout / ".pulumi-state/passphrase"
    assert wrapper(checkout, PULUMI_CONFIG_PASSPHRASE="")[0][:2] == ["unset", str(own)], "which Pulumi refuses"
    assert wrapper(checkout, PULUMI_CONFIG_PASSPHRASE="mine")[0][:2] == ["mine", "unset"], "before make setup"
    own.parent.mkdir()
    own.touch()
    assert wrapper(checkout) == ([], "pulumi: .pulumi-state/passphrase is empty: put the passphrase back\n")


def test_another_state_has_its_own_passphrase(checkout: Path) -> None:
    (team := checkout / "team").mkdir()
    (checkout / ".pulumi-state").mkdir()
    (checkout / ".pulumi-state/passphrase").write_text("secret\n")
    for backend in ("gs://team", f"file://{team}", "file://~/team"):
        given = {"PULUMI_BACKEND_URL": backend, "PULUMI_CONFIG_PASSPHRASE": ""}
        assert wrapper(checkout, **given) == (["", "unset", backend], "")
    seen, _ = wrapper(checkout, team, PULUMI_BACKEND_URL="file://./x", PULUMI_CONFIG_PASSPHRASE="")
    assert seen[2] == f"file://{team}/./x", "the program runs in another folder"


def stack(root: Path, selects: str = "true", outputs: str = "true", **env: str) -> subprocess.CompletedProcess[str]:
    """Run `make stack` with a Pulumi that records how it opens the stack that it makes."""
    sealed = 'echo "${PULUMI_CONFIG_PASSPHRASE-$(cat "$PULUMI_CONFIG_PASSPHRASE_FILE")}" >sealed'
    case = f"case $1$2 in stackinit) {sealed} ;; stackselect) {selects} ;; stackoutput) {outputs} ;; esac"
    program(root / ".venv/bin/pulumi", case)
    program(root / ".venv/bin/python", f'shift 2; exec {sys.executable} {SETUP.parent}/infra/backend.py "$@"')
    return sh(root, "setup/stack.sh", **env)


def test_a_stack_is_sealed_with_the_checkout_s_own_passphrase(checkout: Path) -> None:
    for given in ({"PULUMI_CONFIG_PASSPHRASE": ""}, {"PULUMI_CONFIG_PASSPHRASE_FILE": "/nowhere"}):
        ran = stack(checkout, **given)
        line = f"stack: {next(iter(given))} is not used: {OF_THE_CHECKOUT}"
        assert (ran.returncode, ran.stdout, ran.stderr.splitlines()) == (0, "stack: made local\n", [line])
        passphrase = (checkout / ".pulumi-state/passphrase").read_text()
        assert len(passphrase) > 20
        assert (checkout / "sealed").read_text() == passphrase


def test_a_lost_passphrase_is_not_replaced(checkout: Path) -> None:
    state = state_of(checkout, "local.json")
    ran = stack(checkout)
    said = "stack: .pulumi-state/passphrase is missing, and stack local cannot be read without it: put it back\n"
    assert (ran.returncode, ran.stderr) == (2, said)
    assert not (state / "passphrase").exists()


def test_a_stack_of_another_state_is_selected_if_it_opens(checkout: Path) -> None:
    team = {"PULUMI_BACKEND_URL": "gs://team"}
    ran = stack(checkout, **team)
    assert (ran.returncode, ran.stdout) == (0, "stack: local of gs://team is selected\n")
    ran = stack(checkout, selects="{ echo \"error: no stack named 'local' found\" >&2; exit 255; }", **team)
    said = "no stack named 'local' found in gs://team (PULUMI_BACKEND_URL): make one as docs/team.md says"
    assert (ran.returncode, ran.stderr) == (2, f"stack: {said}\n")
    wrong = "{ echo 'error: failed to decrypt: incorrect passphrase' >&2; exit 255; }"
    ran = stack(checkout, outputs=wrong, PULUMI_CONFIG_PASSPHRASE="", **team)
    said = "PULUMI_CONFIG_PASSPHRASE is empty: set it to the passphrase of its stack"
    assert (ran.returncode, ran.stderr) == (2, f"stack: the state in gs://team (PULUMI_BACKEND_URL) cannot be read: {said}\n")


def test_what_is_needed_of_root_is_said_before_anything_is_done(checkout: Path) -> None:
    """All of it at once, to somebody who is not root, where nothing is there."""
    program(checkout / "bin/id", "echo 1000")
    program(checkout / "bin/sudo", "exit 1")
    ran = sh(checkout, "setup/needs.sh", SCALETIER_LXD_SOCKET=str(checkout / "none"), PYTHON="/nowhere/python")
    assert ran.returncode == 2
    assert ran.stdout == ""
    for said in ("LXD started: sudo setup/lxd.sh system", "NOPASSWD: /usr", "sudo setup/image.sh", "Python 3.11, 3.12 or 3.13"):
        assert said in ran.stderr
    assert not (checkout / ".venv").exists()


def with_recipe(root: Path) -> None:
    """Add the files that say what is installed."""
    for file in (
        "constraints.txt",
        "pyproject.toml",
        *(f"{name}/requirements.txt" for name in ("trainer", "hosts/serving", "hosts/tuner")),
    ):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


def test_a_python_without_venv_is_one_line(checkout: Path) -> None:
    with_recipe(checkout)
    program(checkout / "bin/id", "echo 1000")
    ran = sh(checkout, "setup/venv.sh", PYTHON="/nowhere/python")
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1)
    assert "install Python 3.11, 3.12 or 3.13 with its venv module first" in ran.stderr


def test_a_duration_is_shown_in_minutes_and_seconds(checkout: Path) -> None:
    script = "began=1000; for now in 1007 1060 1185; do date() { echo $now; }; finish made; done"
    assert common(checkout, script).stdout.splitlines() == [
        "test: made, 7 s",
        "test: made, 1 min 0 s",
        "test: made, 3 min 5 s",
    ]


def test_parts_off_a_terminal_write_lines_a_minute_apart(checkout: Path) -> None:
    assert sh(checkout, "setup/together.sh", "sh", "-c", "echo $SETUP_TOGETHER").stdout == "60\n"


def test_a_venv_is_compiled_and_its_checkout_too(checkout: Path) -> None:
    """Also if the environment forbids Python to write bytecode; a second run does nothing."""
    with_recipe(checkout)
    (checkout / "fabfile.py").touch()
    (package := checkout / "infra").mkdir()
    (package / "__init__.py").touch()
    (checkout / "setup/packages.py").write_text("import sys; print('Collecting it'); sys.exit(sys.argv[1:] != ['image'])")
    program(checkout / ".venv/bin/python", f'[ "$2" = "import grpc" ] || exec {sys.executable} "$@"')
    ran = sh(checkout, "setup/venv.sh", PYTHONDONTWRITEBYTECODE="1")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(list(checkout.glob("**/infra/__pycache__/*.pyc"))) == 1
    first, last = ran.stdout.splitlines()
    assert first == "venv: installing the packages that pulumi up and fab need into .venv"
    assert re.fullmatch(r"venv: installed the packages that pulumi up and fab need, \d+ s", last)
    assert sh(checkout, "setup/venv.sh").stdout == ""


def test_what_will_be_made_is_added_up(checkout: Path) -> None:
    """Size and time are those of what is missing, and nothing is said if nothing is."""
    for tool in ("nft", "mksquashfs", "mmdebstrap", "mkfs.btrfs"):
        program(checkout / "bin" / tool, "")
    program(checkout / "bin/python3", "exit 0")  # LXD answers
    program(checkout / "bin/id", "echo 0")
    program(checkout / ".venv/bin/python", "")
    first, *items = sh(checkout, "setup/needs.sh").stdout.splitlines()
    assert first.endswith(": 1.7 GB in about 2 minutes, or 3 minutes if Pulumi is built, on two processors:")
    assert len(items) == 4
    df = program(checkout / "bin/df", "echo; echo disk 9 9 1562500")
    ran = sh(checkout, "setup/needs.sh")
    said = f"setup: 1.7 GB are to be made here, and {checkout} has 1.6 GB free: make room first\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", said)
    df.unlink()
    program(checkout / "bin/pulumi", "echo v3.260.1")
    (checkout / ".cache/hosts/runtime-1").mkdir(parents=True)
    first, *items = sh(checkout, "setup/needs.sh").stdout.splitlines()
    assert first.endswith(": 0.2 GB in about a minute, on two processors:")
    assert [item.partition(":")[0].strip() for item in items] == ["the hosts' image", "MNIST"]
    for file in ("image/image.squashfs", "mnist/manifest.json"):
        (checkout / ".cache" / file).parent.mkdir()
        (checkout / ".cache" / file).touch()
    assert sh(checkout, "setup/needs.sh").stdout == ""


def test_hosts_on_a_machine_that_cannot_have_them(checkout: Path) -> None:
    program(checkout / "bin/uname", "echo Darwin")
    ran = sh(checkout, "setup/needs.sh")
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert "make cloud" in ran.stderr


def test_a_demo_leaves_a_stack_that_is_there_alone(checkout: Path) -> None:
    (checkout / ".scaletier/demo").mkdir(parents=True)
    program(checkout / "bin/make", "echo made >made")
    ran = sh(checkout, "setup/demo.sh")
    assert (ran.returncode, ran.stdout) == (2, "")
    said = "demo: stack demo is up already: `pulumi destroy --stack demo` first, or `make demo STACK=other`\n"
    assert ran.stderr == said
    assert not (checkout / "made").exists()


def tools(root: Path, leftovers: str = "exit 0") -> None:
    """Make a .venv whose Pulumi records its calls, and whose Python reports `leftovers`."""
    program(
        root / ".venv/bin/pulumi",
        """echo "$@" "${PULUMI_BACKEND_URL:-here}" >>pulumi.log
case $1$2 in
  stackrm) rm -f .pulumi-state/.pulumi/stacks/scaletier/"$3".json* ;;
  stackexport) cat exported ;;
esac""",
    )
    program(root / ".venv/bin/python", f"case $2 in infra.lxd.orphans) {leftovers} ;; *) echo $* >>python.log ;; esac")
    (root / ".venv/bin/activate").write_text(f"PATH={root}/.venv/bin:$PATH\n")


def state_of(root: Path, *files: str) -> Path:
    for file in files:
        (path := root / ".pulumi-state/.pulumi/stacks/scaletier" / file).parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root / ".pulumi-state"


def clean(root: Path, *sockets: Path) -> subprocess.CompletedProcess[str]:
    there = " ".join(map(str, sockets or [root / "none"]))
    return sh(root, "setup/clean.sh", SCALETIER_LXD_SOCKET=there, PULUMI_BACKEND_URL="gs://team")


def test_clean_keeps_what_was_written_by_hand(checkout: Path) -> None:
    tools(checkout)
    state = state_of(checkout, "local.json", "local.json.attrs", "local.json.bak", "prod.json.gz", "old.json.gz.bak")
    (state / "passphrase").write_text("secret")
    (checkout / "Pulumi.prod.yaml").write_text("encryptionsalt: v1:x\n")
    ran = clean(checkout)
    assert (ran.returncode, ran.stderr) == (0, "")
    asked = (checkout / "pulumi.log").read_text().splitlines()
    rm = "--yes --non-interactive"
    assert asked == [f"stack rm local {rm} here", f"stack rm prod {rm} --preserve-config here"]
    assert "clean: .pulumi-state/passphrase stays, for Pulumi.prod.yaml cannot be used without\n" in ran.stdout
    assert [path.name for path in state.iterdir()] == ["passphrase"]
    assert not (checkout / ".venv").exists()
    (checkout / "Pulumi.prod.yaml").unlink()
    assert clean(checkout).returncode == 0
    assert not state.exists()


def test_clean_stops_where_a_stack_is_up(checkout: Path) -> None:
    tools(checkout)
    for stack, file in (("team", "team.json.bak"), ("prod", "prod.json.gz")):
        (folder := checkout / ".scaletier" / stack).mkdir(parents=True)
        (folder / "inventory.json").touch()
        state_of(checkout, file)
    ran = clean(checkout)
    assert (ran.returncode, ran.stderr) == (2, "clean: stack prod is up: `pulumi destroy --stack prod` first\n")
    (checkout / ".venv/bin/pulumi").unlink()
    shutil.rmtree(checkout / ".scaletier/prod")
    assert "clean: .pulumi-state stays, other stacks are in it\n" in clean(checkout).stdout
    assert (checkout / ".pulumi-state/.pulumi/stacks/scaletier/prod.json.gz").exists()


def test_clean_distinguishes_hosts_from_retained_buckets(checkout: Path) -> None:
    (socket := checkout / "socket").touch()
    tools(checkout, "if [ $3 = --up ]; then echo scaletier-local-aaaaaa; fi")
    ran = clean(checkout, socket)
    assert ran.returncode == 2
    assert "of this checkout or another (scaletier-local-aaaaaa): `pulumi destroy` first" in ran.stderr
    tools(checkout, "if [ $3 = --kept ]; then echo the bucket stays; fi")
    ran = clean(checkout, socket)
    assert (ran.returncode, ran.stdout.splitlines()[0]) == (0, "clean: the bucket stays")
    assert not (checkout / ".venv").exists()


def test_clean_stops_where_lxd_is_down(checkout: Path) -> None:
    (socket := checkout / "socket").touch()
    tools(checkout, "echo leftovers: LXD does not answer >&2; exit 1")
    said = "leftovers: LXD does not answer\nclean: nothing is removed, as it is unknown whether hosts are left\n"
    ran = clean(checkout, socket)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", said)
    (pid := checkout / ".cache/lxd/lxd.pid").parent.mkdir(parents=True)
    pid.write_text("none")
    assert clean(checkout).returncode == 2, "set-up started it"
    pid.unlink()
    assert clean(checkout).returncode == 0, "a checkout for Google alone"


def demo(root: Path, exported: str, claimed: str = "", left: int = 3) -> subprocess.CompletedProcess[str]:
    tools(root, f"if [ $3$4 = --claimeddemo ]; then echo '{claimed}'; else exit {left}; fi")
    (root / "exported").write_text(exported)
    program(root / "bin/make", 'echo "${PULUMI_BACKEND_URL:-here}" >made')
    return sh(root, "setup/demo.sh", PULUMI_BACKEND_URL="gs://team")


def test_a_demo_leaves_what_is_anothers_alone(checkout: Path) -> None:
    """A state that holds anything, of this checkout and never of a team; and a bucket that was to stay."""
    ran = demo(checkout, '{"deployment": {"resources": [{"urn": "urn:pulumi:demo"}]}}')
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert "stack demo has resources already: `pulumi destroy --stack demo` first, or `make demo STACK=other`" in ran.stderr
    assert (checkout / "made").read_text() == "here\n"
    ran = demo(checkout, '{"deployment": {}}', "project scaletier-demo-bbbbbb")
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert "already (project scaletier-demo-bbbbbb): `make demo STACK=other` leaves it alone" in ran.stderr
    assert (checkout / "pulumi.log").read_text().splitlines() == ["stack export here"] * 2


def test_a_demo_ends_with_the_next_commands(checkout: Path) -> None:
    """Once nothing is left, and only if the model is good."""
    for accuracy, ended in (("0.98", 0), ("0.50", 1)):
        program(checkout / ".venv/bin/fab", f'echo "12:00:00 INFO Final metrics after 2000 steps: accuracy: {accuracy}"')
        ran = demo(checkout, '{"deployment": {}}', left=0)
        assert ran.returncode == ended, ran.stderr
        _, left, following = ran.stdout.partition("Nothing is left:")
        commands = [line.split("  ")[1] for line in following.splitlines() if line.startswith("  ")]
        assert left
        assert [command.split()[:2] for command in commands] == (
            [
                ["make", "setup"],
                ["source", ".venv/bin/activate"],
                ["pulumi", "up"],
                ["fab", "train"],
                ["fab", "logs"],
                ["fab", "get"],
                ["pulumi", "config"],
                ["pulumi", "destroy"],
            ]
            if ended == 0
            else []
        )


def test_what_root_makes_in_the_cache_is_the_owners(checkout: Path) -> None:
    (checkout / ".cache/lxd").mkdir(parents=True)
    program(checkout / "bin/chown", 'echo "$@"')
    owner = f"{checkout.stat().st_uid}:{checkout.stat().st_gid}"
    said = common(checkout, "owned .cache/lxd").stdout.splitlines()
    assert said == [f"{owner} {checkout}/.cache", f"-R {owner} .cache/lxd"]


def test_what_root_raised_root_alone_puts_back(checkout: Path) -> None:
    (limits := checkout / ".cache/lxd/limits").parent.mkdir(parents=True)
    limits.write_text(f"{checkout}/limit 1\n")
    program(checkout / "bin/id", "echo 1000")
    program(checkout / "bin/rm", "exit 1")
    ran = sh(checkout, "setup/lxd.sh", "down", SCALETIER_LXD_SOCKET=str(checkout / "none"))
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert "`sudo setup/lxd.sh down` first" in ran.stderr
    assert not (checkout / "limit").exists()


@pytest.mark.parametrize("importing", ["echo imported", "exit 3"])
def test_the_image_of_a_checkout_in_a_folder_with_a_space(checkout: Path, importing: str) -> None:
    root = checkout.rename(checkout.with_name("check out"))
    (root / "ansible").mkdir()
    program(root / "bin/id", "echo 0")
    program(
        root / ".venv/bin/python",
        f"""case $1$2$3 in
  -minfra.lxd.imageimport) {importing} ;; -minfra.lxd.image) exit 1 ;; *) exec {sys.executable} "$@" ;; esac""",
    )
    program(root / ".venv/bin/ansible-playbook", 'echo "$2 $3" >>ran')
    ran = sh(root, "setup/image.sh")
    assert ran.returncode == (3 if "exit" in importing else 0), ran.stderr
    assert (root / "ansible/ran").read_text() == f"-e cache='{root}/.cache/image'\n" * 2
