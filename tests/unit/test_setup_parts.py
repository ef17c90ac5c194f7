"""The set-up scripts, in a copy with its own PATH: Python and Pulumi, checks of downloads, messages."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
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
DISK = "echo; echo disk 9 9 9999999"  # what `df -P` prints if 10 GB are free
OF_THE_CHECKOUT = "the stacks of this checkout have the passphrase in .pulumi-state/passphrase"


def test_all_versions_of_pulumi_agree() -> None:
    """The version required of a user's own Pulumi equals the pinned, built and declared one."""
    root = SETUP.parent
    assert f"least_pulumi={LEAST}\n" in (SETUP / "common.sh").read_text()
    assert f'requiredPulumiVersion: ">={LEAST}"\n' in (root / "Pulumi.yaml").read_text()
    assert f"\npulumi=={LEAST}\n" in (root / "constraints.txt").read_text()
    assert f"github.com/pulumi/pulumi/pkg/v3 v{LEAST}\n" in (SETUP / "pulumi/go.mod").read_text()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with only the set-up scripts, and bin/ on its PATH for fake programs."""
    (root := tmp_path / "checkout").joinpath("bin").mkdir(parents=True)
    shutil.copytree(SETUP, root / "setup", ignore=shutil.ignore_patterns("go.*", "*.go"))
    write_program(root / "bin" / "python3", f'exec {sys.executable} "$@"')
    return root


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def run_script(root: Path, *command: str, path: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{path}{root}/bin:{BASE}", "HOME": str(root), **env}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit(), check=False)


def run_common(root: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run_script(root, "sh", "-euc", f"part=test; . setup/common.sh; {script}", **env)


def test_version_comparison(checkout: Path) -> None:
    enough = ["3.250.0 3.250.0", "3.251.0-alpha.1 3.250.0", "4.0.0 3.250.0", "1.26 1.25.11"]
    too_old = ["3.99.9 3.250.0", "1.25.9 1.25.11"]
    script = "; ".join(f"if newer {pair}; then echo {pair}; fi" for pair in [*enough, *too_old])
    assert run_common(checkout, script).stdout.splitlines() == enough


def test_the_first_suitable_python_is_used(checkout: Path) -> None:
    write_program(checkout / "bin" / "python3.11", "exit 1")  # like pyenv's for a version that is not selected
    write_program(checkout / "bin" / "python3.12", "exit 0")
    assert run_common(checkout, "find_python; echo $python").stdout == "python3.12\n"
    python = write_program(checkout / "my python", "exit 0")
    assert run_common(checkout, "find_python; echo $python", PYTHON=str(python)).stdout == f"{python}\n"


def test_pip_installs_into_environments(checkout: Path) -> None:
    (checkout / "pip.conf").write_text("[install]\nuser = true\n")
    pip = f"{sys.executable} -m pip install --dry-run --no-index --disable-pip-version-check pip"
    pip += " && echo ${UV_NO_INSTALLER_METADATA-complete}"
    elsewhere = dict.fromkeys(("PIP_PREFIX", "PIP_ROOT", "PIP_TARGET", "UV_NO_INSTALLER_METADATA"), str(checkout / "elsewhere"))
    result = run_common(checkout, pip, PIP_USER="1", PIP_CONFIG_FILE=str(checkout / "pip.conf"), **elsewhere)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\ncomplete\n"), "packages without INSTALLER would count as unfinished"


def test_no_suitable_python_is_an_error(checkout: Path) -> None:
    result = run_common(checkout, "find_python || fail none", PYTHON="/nowhere/python")
    assert (result.returncode, result.stderr) == (2, "test: none\n")


def run_choose(root: Path, **env: str) -> subprocess.CompletedProcess[str]:
    nowhere = (root / "nowhere").as_uri()
    return run_script(root, "setup/pulumi-cli.sh", **{"PULUMI_DOWNLOADS": nowhere, "PULUMI_SUMS": f"{nowhere}/sums", **env})


def chosen_pulumi(root: Path) -> str:
    return (root / ".cache/pulumi/cli").read_text().strip()


def test_a_users_own_pulumi_comes_first(checkout: Path) -> None:
    own_pulumi = write_program(checkout / "bin/pulumi", "echo v3.260.1")
    # Another checkout's wrapper is no Pulumi of the user's own.
    (venv := checkout / "other/bin").mkdir(parents=True)
    write_program(checkout / "other/setup/pulumi.sh", "echo v9.0.0")
    (venv / "pulumi").symlink_to("../setup/pulumi.sh")
    result = run_choose(checkout, path=f"{venv}:")
    assert (result.returncode, result.stdout) == (0, f"pulumi: your own, {own_pulumi} (v3.260.1)\n")
    assert chosen_pulumi(checkout) == str(own_pulumi)
    assert run_choose(checkout, SETUP_LINE_SECONDS="60").stdout == "", "the choice is unchanged"


def publish_release(folder: Path, version: str) -> tuple[str, str]:
    """Publish a release of Pulumi in a folder; return its URL and its checksums."""
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


def test_the_download_replaces_an_old_own_pulumi(checkout: Path) -> None:
    own_pulumi = write_program(checkout / "bin/pulumi", "echo v3.99.0")
    downloads, sums = publish_release(checkout / "release", LEAST)
    result = run_choose(checkout, PULUMI_DOWNLOADS=downloads, PULUMI_SUMS=sums)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"(v3.99.0, {own_pulumi})" in result.stdout
    assert re.fullmatch(rf"pulumi: v{LEAST}, Pulumi's download, \d+ s", result.stdout.splitlines()[-1])
    assert chosen_pulumi(checkout) == str(checkout / ".cache/pulumi/pulumi")
    result_again = run_choose(checkout)
    assert result_again.stdout.splitlines()[-1] == f"pulumi: v{LEAST} is there"


def test_a_download_with_a_wrong_checksum_is_not_used(checkout: Path) -> None:
    downloads, sums = publish_release(checkout / "release", LEAST)
    (checkout / "release/sums").write_text(re.sub("^.", "x", (checkout / "release/sums").read_text()))
    result = run_choose(checkout, PULUMI_DOWNLOADS=downloads, PULUMI_SUMS=sums)
    assert result.returncode == 2
    assert "is not what was published" in result.stderr
    assert "no Go 1.25.11 or later to build it" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list((checkout / ".cache/pulumi").glob("*pulumi*"))


def test_a_download_that_cannot_be_unpacked_is_not_used(checkout: Path) -> None:
    downloads, sums = publish_release(checkout / "release", LEAST)
    (archive,) = (checkout / "release").glob("*.tar.gz")
    archive.write_bytes(archive.read_bytes()[:99])
    (checkout / "release/sums").write_text(f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive.name}\n")
    result = run_choose(checkout, PULUMI_DOWNLOADS=downloads, PULUMI_SUMS=sums)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert f"{archive.name} cannot be unpacked" in result.stderr
    assert not (checkout / ".cache/pulumi/cli").exists()
    assert not list((checkout / ".cache/pulumi").glob("*.tar.gz"))


def test_a_download_whose_unpacking_was_killed_is_fetched_again(checkout: Path) -> None:
    """Beside its first program there may be those of an older version."""
    for name in ("pulumi", "pulumi-resource-pulumi-python"):
        write_program(checkout / ".cache/pulumi" / name, f"echo v{LEAST}")
    downloads, sums = publish_release(checkout / "release", LEAST)
    assert "Pulumi's download" in run_choose(checkout, PULUMI_DOWNLOADS=downloads, PULUMI_SUMS=sums).stdout


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
    write_program(
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
    result = run_choose(root)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(rf"pulumi: v{LEAST}, built by go1.26.0, \d+ s", result.stdout.splitlines()[-1])
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


def test_the_wrapper_runs_the_chosen_pulumi(checkout: Path) -> None:
    write_program(checkout / "bin/pulumi", 'echo v3.300.0 "$PULUMI_CONFIG_PASSPHRASE_FILE" "$@"')
    run_choose(checkout)
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/pulumi").symlink_to("../../setup/pulumi.sh")
    (link := checkout / "mine").symlink_to(".venv/bin/pulumi")
    for called in (checkout / ".venv/bin/pulumi", link):
        assert run_script(checkout, str(called), "up").stdout == f"v3.300.0 {checkout}/.pulumi-state/passphrase up\n"
    for folder in (".venv/bin", "setup"):
        (checkout / "elsewhere" / folder).mkdir(parents=True)
    assert run_script(checkout, ".venv/bin/pulumi", "up", CDPATH=f"{checkout}/elsewhere").stdout.startswith("v3.300.0 ")
    (checkout / "bin/pulumi").unlink()
    result = run_script(checkout, ".venv/bin/pulumi", "up")
    assert (result.returncode, result.stderr) == (2, f"pulumi: {checkout}/bin/pulumi is not there: run `make pulumi`\n")


def run_wrapper(root: Path, cwd: Path | None = None, **env: str) -> tuple[list[str], str]:
    """Return the passphrase, its file and the backend that the wrapper's Pulumi gets, and the wrapper's stderr."""
    print_environment = (
        'echo "${PULUMI_CONFIG_PASSPHRASE-unset}"; echo "${PULUMI_CONFIG_PASSPHRASE_FILE-unset}"; echo "${PULUMI_BACKEND_URL-}"'
    )
    write_program(root / "bin/pulumi", f"[ $1 != version ] || {{ echo v3.300.0; exit; }}\n{print_environment}")
    run_choose(root)
    (root / ".venv/bin").mkdir(parents=True, exist_ok=True)
    if not (link := root / ".venv/bin/pulumi").is_symlink():
        link.symlink_to("../../setup/pulumi.sh")
    script = f"cd {cwd or root} && exec {link} up"
    result = run_script(root, "sh", "-c", script, **env)
    return result.stdout.splitlines(), result.stderr


@pytest.mark.parametrize(
    ("variables", "unused"),
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
def test_the_checkout_s_passphrase_has_precedence(checkout: Path, variables: dict[str, str], unused: str) -> None:
    state_of(checkout).mkdir()
    (own_file := checkout / ".pulumi-state/passphrase").write_text("secret\n")
    environment, message = run_wrapper(checkout, **variables)
    assert environment[:2] == ["unset", str(own_file)]
    line = f"pulumi: {unused} is not used: {OF_THE_CHECKOUT}\n"
    assert message == (line if unused else "")


def test_no_stack_is_encrypted_with_an_empty_passphrase(checkout: Path) -> None:
    own_file = checkout / ".pulumi-state/passphrase"
    assert run_wrapper(checkout, PULUMI_CONFIG_PASSPHRASE="")[0][:2] == ["unset", str(own_file)], "Pulumi refuses an empty one"
    assert run_wrapper(checkout, PULUMI_CONFIG_PASSPHRASE="mine")[0][:2] == ["mine", "unset"], "before make setup"
    own_file.parent.mkdir()
    own_file.touch()
    assert run_wrapper(checkout) == ([], "pulumi: .pulumi-state/passphrase is empty: put the passphrase back\n")


def test_another_state_has_its_own_passphrase(checkout: Path) -> None:
    (team := checkout / "team").mkdir()
    (checkout / ".pulumi-state").mkdir()
    (checkout / ".pulumi-state/passphrase").write_text("secret\n")
    for backend in ("gs://team", f"file://{team}", "file://~/team"):
        variables = {"PULUMI_BACKEND_URL": backend, "PULUMI_CONFIG_PASSPHRASE": ""}
        assert run_wrapper(checkout, **variables) == (["", "unset", backend], "")
    environment, _ = run_wrapper(checkout, team, PULUMI_BACKEND_URL="file://./x", PULUMI_CONFIG_PASSPHRASE="")
    assert environment[2] == f"file://{team}/./x", "the program runs in another folder"


def run_stack(root: Path, selects: str = "true", outputs: str = "true", **env: str) -> subprocess.CompletedProcess[str]:
    """Run `make stack` with a Pulumi that records the passphrase of the created stack."""
    sealed = 'echo "${PULUMI_CONFIG_PASSPHRASE-$(cat "$PULUMI_CONFIG_PASSPHRASE_FILE")}" >sealed'
    case = f"case $1$2 in stackinit) {sealed} ;; stackselect) {selects} ;; stackoutput) {outputs} ;; esac"
    write_program(root / ".venv/bin/pulumi", case)
    write_program(root / ".venv/bin/python", f'shift 2; exec {sys.executable} {SETUP.parent}/infra/backend.py "$@"')
    return run_script(root, "setup/stack.sh", **env)


def test_a_stack_is_encrypted_with_the_checkout_s_passphrase(checkout: Path) -> None:
    for variables in ({"PULUMI_CONFIG_PASSPHRASE": ""}, {"PULUMI_CONFIG_PASSPHRASE_FILE": "/nowhere"}):
        result = run_stack(checkout, **variables)
        line = f"stack: {next(iter(variables))} is not used: {OF_THE_CHECKOUT}"
        assert (result.returncode, result.stdout, result.stderr.splitlines()) == (0, "stack: made local\n", [line])
        passphrase = (checkout / ".pulumi-state/passphrase").read_text()
        assert len(passphrase) > 20
        assert (checkout / "sealed").read_text() == passphrase


def test_a_lost_passphrase_is_not_replaced(checkout: Path) -> None:
    state = state_of(checkout, "local.json")
    result = run_stack(checkout)
    message = "stack: .pulumi-state/passphrase is missing, and stack local cannot be read without it: put it back\n"
    assert (result.returncode, result.stderr) == (2, message)
    assert not (state / "passphrase").exists()


def test_a_stack_of_another_state_is_selected_if_it_opens(checkout: Path) -> None:
    team = {"PULUMI_BACKEND_URL": "gs://team"}
    result = run_stack(checkout, **team)
    assert (result.returncode, result.stdout) == (0, "stack: local of gs://team is selected\n")
    result = run_stack(checkout, selects="{ echo \"error: no stack named 'local' found\" >&2; exit 255; }", **team)
    message = "no stack named 'local' found in gs://team (PULUMI_BACKEND_URL): make one as docs/team.md says"
    assert (result.returncode, result.stderr) == (2, f"stack: {message}\n")
    wrong = "{ echo 'error: failed to decrypt: incorrect passphrase' >&2; exit 255; }"
    result = run_stack(checkout, outputs=wrong, PULUMI_CONFIG_PASSPHRASE="", **team)
    message = "PULUMI_CONFIG_PASSPHRASE is empty: set it to the passphrase of its stack"
    assert (result.returncode, result.stderr) == (
        2,
        f"stack: the state in gs://team (PULUMI_BACKEND_URL) cannot be read: {message}\n",
    )


def test_needs_of_root_are_reported_before_any_change(checkout: Path) -> None:
    """Report all of it at once to a user other than root if everything is missing."""
    write_program(checkout / "bin/id", "echo 1000")
    write_program(checkout / "bin/sudo", "exit 1")
    result = run_script(checkout, "setup/needs.sh", SCALETIER_LXD_SOCKET=str(checkout / "none"), PYTHON="/nowhere/python")
    assert result.returncode == 2
    assert result.stdout == ""
    for message in (
        "LXD started: sudo setup/lxd.sh system",
        "NOPASSWD: /usr",
        "sudo setup/image.sh",
        "Python 3.11, 3.12 or 3.13",
    ):
        assert message in result.stderr
    assert not (checkout / ".venv").exists()


def test_missing_packages_are_one_line_with_the_command_that_installs_them(checkout: Path) -> None:
    for name, script in {"id": "echo 1000", "python3": "exit 1", "dpkg-query": "", "apt-get": ""}.items():
        write_program(checkout / "bin" / name, script)
    result = run_script(checkout, "setup/lxd.sh", "system", SCALETIER_LXD_SOCKET=str(checkout / "none"), SETUP_ALONE="lxd")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.endswith(" uidmap first: `sudo setup/lxd.sh system` does\n")


def write_recipe(root: Path) -> None:
    """Add the files that list the packages to install."""
    for file in (
        "constraints.txt",
        "pyproject.toml",
        *(f"{name}/requirements.txt" for name in ("trainer", "hosts/serving", "hosts/tuner")),
    ):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


def test_a_python_without_venv_is_one_line(checkout: Path) -> None:
    write_recipe(checkout)
    write_program(checkout / "bin/id", "echo 1000")
    result = run_script(checkout, "setup/venv.sh", PYTHON="/nowhere/python")
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert "install Python 3.11, 3.12 or 3.13 with its venv module first" in result.stderr


def test_a_duration_is_shown_in_minutes_and_seconds(checkout: Path) -> None:
    script = "began=1000; for now in 1007 1060 1185; do date() { echo $now; }; finish made; done"
    assert run_common(checkout, script).stdout.splitlines() == [
        "test: made, 7 s",
        "test: made, 1 min 0 s",
        "test: made, 3 min 5 s",
    ]


def test_without_a_terminal_parts_print_a_line_a_minute(checkout: Path) -> None:
    assert run_script(checkout, "setup/together.sh", "sh", "-c", "echo $SETUP_LINE_SECONDS").stdout == "60\n"


def test_a_venv_and_its_checkout_are_compiled(checkout: Path) -> None:
    """Also if the environment forbids Python to write bytecode; a second run does nothing."""
    write_recipe(checkout)
    (checkout / "fabfile.py").touch()
    (package := checkout / "infra").mkdir()
    (package / "__init__.py").touch()
    (checkout / "setup/packages.py").write_text("import sys; print('Collecting it'); sys.exit(sys.argv[1:] != ['image'])")
    write_program(checkout / ".venv/bin/python", f'[ "$2" = "import grpc" ] || exec {sys.executable} "$@"')
    result = run_script(checkout, "setup/venv.sh", PYTHONDONTWRITEBYTECODE="1")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(list(checkout.glob("**/infra/__pycache__/*.pyc"))) == 1
    first, last = result.stdout.splitlines()
    assert first == "venv: installing the packages that pulumi up and fab need into .venv"
    assert re.fullmatch(r"venv: installed the packages that pulumi up and fab need, \d+ s", last)
    assert run_script(checkout, "setup/venv.sh").stdout == ""


def test_a_venv_left_half_made_is_made_again(checkout: Path) -> None:
    """Ctrl-C or a full disk ends `python -m venv` after its Python is there, and before pip is."""
    write_recipe(checkout)
    (checkout / "fabfile.py").touch()
    (checkout / "infra").mkdir()
    (checkout / "infra/__init__.py").touch()
    (checkout / "setup/packages.py").write_text("")
    write_program(checkout / ".venv/bin/python", "exit 1")
    whole = write_program(checkout / "whole", f'[ "$2" = "import grpc" ] || exec {sys.executable} "$@"')
    python = write_program(checkout / "python", f'[ "$2" != venv ] || cp {whole} .venv/bin/python')
    result = run_script(checkout, "setup/venv.sh", PYTHON=str(python))
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("fault", ["copied", "half made", "another PYTHON", "shared", "none"])
def test_a_venv_of_another_folder_or_python_is_made_again(checkout: Path, fault: str) -> None:
    """Its programs and the editable install name the folder in which it was made; its stamps fit packages that it loses."""
    write_recipe(checkout)
    (checkout / "fabfile.py").touch()
    (checkout / "infra").mkdir()
    (checkout / "infra/__init__.py").touch()
    (checkout / "setup/packages.py").write_text("")
    (version := checkout / "version").write_text("Python 3.11.7")
    script = '[ "$1" != -V ] || exec cat {}\n{}'
    run = f'[ "$2" = "import grpc" ] || exec {sys.executable} "$@"'
    whole = write_program(checkout / "whole", script.format(".venv/version", run))
    made = f"rm -rf .venv; mkdir -p .venv/bin; cp {whole} .venv/bin/python; cp version .venv; "
    made += f"echo 'command = it -m venv {checkout}/.venv' >.venv/pyvenv.cfg"
    make = f'[ "$2" != venv ] || {{ echo "$@" >>made; {made}; }}'
    python = write_program(checkout / "python", script.format("version", make))

    def run_venv(*extra: str) -> list[str]:
        result = run_script(checkout, "setup/venv.sh", *extra, PYTHON=str(python))
        assert (result.returncode, result.stderr) == (0, "")
        return (checkout / "made").read_text().splitlines()

    assert run_venv("dev") == run_venv() == ["-m venv --clear .venv"]
    if fault in ("copied", "shared"):
        (checkout / ".venv/pyvenv.cfg").write_text("command = it -m venv /x/checkout/.venv\n")
    if fault == "half made":
        (checkout / ".venv/.image").unlink()
        write_program(checkout / ".venv/bin/python", "exit 1")
    if fault == "another PYTHON":
        version.write_text("Python 3.12.3")
    if fault == "shared":
        (checkout / ".venv").rename(checkout / "other")
        (checkout / ".venv").symlink_to("other")
    remade = fault in ("copied", "half made", "another PYTHON")
    assert run_venv() == ["-m venv --clear .venv"] * (2 if remade else 1)
    assert (checkout / ".venv/.dev").exists() is not remade
    assert run_venv() == ["-m venv --clear .venv"] * (2 if remade else 1)


def test_sizes_and_times_of_missing_parts_are_added_up(checkout: Path) -> None:
    """Add up size and time of the missing parts; print nothing if none is missing."""
    for tool in ("nft", "mksquashfs", "mmdebstrap", "mkfs.btrfs"):
        write_program(checkout / "bin" / tool, "")
    write_program(checkout / "bin/python3", "exit 0")  # LXD answers
    write_program(checkout / "bin/id", "echo 0")
    python = write_program(checkout / ".venv/bin/python", "exit 1")
    write_program(checkout / "bin/df", DISK)
    first, *items = run_script(checkout, "setup/needs.sh").stdout.splitlines()
    assert first.endswith(": 1.8 GB in about 2 minutes, or 3 minutes if Pulumi is built, on two processors:")
    assert len(items) == 4
    df = write_program(checkout / "bin/df", "echo; echo disk 9 9 1562500")
    result = run_script(checkout, "setup/needs.sh")
    message = f"setup: 1.8 GB are to be made here, and {checkout} has 1.6 GB free: make room first\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)
    df.unlink()
    write_program(checkout / "bin/pulumi", "echo v3.260.1")
    (checkout / ".cache/hosts/runtime-1").mkdir(parents=True)
    first, *items = run_script(checkout, "setup/needs.sh").stdout.splitlines()
    assert first.endswith(": 0.3 GB in about a minute, on two processors:")
    assert [item.partition(":")[0].strip() for item in items] == ["the hosts' image", "MNIST"]
    (checkout / ".cache/mnist").mkdir()
    (checkout / ".cache/mnist/manifest.json").touch()
    write_program(python, '[ "$*" = "-m infra.lxd.image" ]')
    assert run_script(checkout, "setup/needs.sh").stdout == "", "LXD has the image of another checkout"
    write_program(python, "exit 1")
    (checkout / ".cache/image").mkdir()
    (image := checkout / ".cache/image/image.squashfs").touch()
    (checkout / "ansible/__pycache__").mkdir(parents=True)
    os.utime(image, (1, 1))
    (checkout / "ansible/__pycache__/it.pyc").touch()
    assert run_script(checkout, "setup/needs.sh").stdout == ""
    (checkout / "ansible/image.yml").touch()
    assert "the hosts' image" in run_script(checkout, "setup/needs.sh").stdout, "the image is of an older recipe"


def test_the_docs_have_the_time_of_a_set_up_from_nothing(checkout: Path) -> None:
    for name, script in {"id": "echo 0", "python3": "exit 1", "dpkg-query": "exit 1", "apt-get": "", "df": DISK}.items():
        write_program(checkout / "bin" / name, script)
    result = run_script(checkout, "setup/needs.sh", SCALETIER_LXD_SOCKET=str(checkout / "none"), PYTHON="/nowhere/python")
    assert " in about 2 minutes, or 4 minutes if Pulumi is built, on two processors:\n" in result.stdout, result.stderr
    page = " ".join((SETUP.parent / "docs/get-started.md").read_text().split())
    assert "If all are missing, it takes about two minutes on two CPUs, or four if Pulumi is built from source." in page


def test_a_machine_without_support_for_hosts_is_one_line(checkout: Path) -> None:
    write_program(checkout / "bin/uname", "echo Darwin")
    result = run_script(checkout, "setup/needs.sh")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "make cloud" in result.stderr


def test_a_demo_does_not_touch_an_existing_stack(checkout: Path) -> None:
    (checkout / ".scaletier/demo").mkdir(parents=True)
    write_program(checkout / "bin/make", "echo made >made")
    result = run_script(checkout, "setup/demo.sh")
    assert (result.returncode, result.stdout) == (2, "")
    message = "demo: stack demo is up already: `pulumi destroy --stack demo` first, or `make demo STACK=other`\n"
    assert result.stderr == message
    assert not (checkout / "made").exists()


def write_tools(root: Path, leftovers: str = "exit 0") -> None:
    """Create a .venv whose Pulumi records its calls, and whose Python reports `leftovers`."""
    write_program(
        root / ".venv/bin/pulumi",
        """echo "$@" "${PULUMI_BACKEND_URL:-here}" >>pulumi.log
case $1$2 in
  stackrm) rm -f .pulumi-state/.pulumi/stacks/scaletier/"$3".json* ;;
  stackexport) cat exported ;;
esac""",
    )
    write_program(root / ".venv/bin/python", f"case $2 in infra.lxd.orphans) {leftovers} ;; *) echo $* >>python.log ;; esac")
    (root / ".venv/bin/activate").write_text(f"PATH={root}/.venv/bin:$PATH\n")


def state_of(root: Path, *files: str) -> Path:
    for file in files:
        (path := root / ".pulumi-state/.pulumi/stacks/scaletier" / file).parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root / ".pulumi-state"


def run_clean(root: Path, *sockets: Path) -> subprocess.CompletedProcess[str]:
    paths = " ".join(map(str, sockets or [root / "none"]))
    return run_script(root, "setup/clean.sh", SCALETIER_LXD_SOCKET=paths, PULUMI_BACKEND_URL="gs://team", SETUP_ALONE="lxd")


def test_clean_keeps_files_written_by_hand(checkout: Path) -> None:
    write_tools(checkout)
    state = state_of(checkout, "local.json", "local.json.attrs", "local.json.bak", "prod.json.gz", "old.json.gz.bak")
    (state / "passphrase").write_text("secret")
    (checkout / "Pulumi.prod.yaml").write_text("encryptionsalt: v1:x\n")
    result = run_clean(checkout)
    assert (result.returncode, result.stderr) == (0, "")
    calls = (checkout / "pulumi.log").read_text().splitlines()
    rm = "--yes --non-interactive"
    assert calls == [f"stack rm local {rm} here", f"stack rm prod {rm} --preserve-config here"]
    assert "clean: .pulumi-state/passphrase stays, for Pulumi.prod.yaml cannot be used without\n" in result.stdout
    assert [path.name for path in state.iterdir()] == ["passphrase"]
    assert not (checkout / ".venv").exists()
    (checkout / "Pulumi.prod.yaml").unlink()
    assert run_clean(checkout).returncode == 0
    assert not state.exists()


def test_clean_stops_if_a_stack_is_up(checkout: Path) -> None:
    write_tools(checkout)
    for stack, file in (("team", "team.json.bak"), ("prod", "prod.json.gz")):
        (folder := checkout / ".scaletier" / stack).mkdir(parents=True)
        (folder / "inventory.json").touch()
        state_of(checkout, file)
    result = run_clean(checkout)
    assert (result.returncode, result.stderr) == (2, "clean: stack prod is up: `pulumi destroy --stack prod` first\n")
    (checkout / ".venv/bin/pulumi").unlink()
    shutil.rmtree(checkout / ".scaletier/prod")
    assert "clean: .pulumi-state stays, other stacks are in it\n" in run_clean(checkout).stdout
    assert (checkout / ".pulumi-state/.pulumi/stacks/scaletier/prod.json.gz").exists()


def test_clean_distinguishes_hosts_from_retained_buckets(checkout: Path) -> None:
    (socket := checkout / "socket").touch()
    write_tools(checkout, "if [ $3 = --up ]; then echo scaletier-local-aaaaaa; fi")
    result = run_clean(checkout, socket)
    assert result.returncode == 2
    assert "of this checkout or another (scaletier-local-aaaaaa): `pulumi destroy` first" in result.stderr
    write_tools(checkout, "if [ $3 = --kept ]; then echo the bucket is retained; fi")
    result = run_clean(checkout, socket)
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "clean: the bucket is retained")
    assert not (checkout / ".venv").exists()


def test_clean_stops_if_lxd_is_down(checkout: Path) -> None:
    (socket := checkout / "socket").touch()
    write_tools(checkout, "echo leftovers: LXD does not answer >&2; exit 1")
    message = "leftovers: LXD does not answer\nclean: nothing is removed, as it is unknown whether hosts are left\n"
    result = run_clean(checkout, socket)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)
    (pid := checkout / ".cache/lxd/lxd.pid").parent.mkdir(parents=True)
    pid.write_text("none")
    assert run_clean(checkout).returncode == 2, "set-up started LXD"
    pid.unlink()
    assert run_clean(checkout).returncode == 0, "a checkout for Google alone"


def test_clean_needs_python_to_see_what_is_left(checkout: Path) -> None:
    (socket := checkout / "socket").touch()
    assert run_clean(checkout, socket).returncode == 0, "nothing was set up here"
    (checkout / ".cache/image").mkdir(parents=True)
    result = run_clean(checkout, socket)
    message = "clean: nothing is removed, as it takes Python to see what is left in LXD: `make venv` first\n"
    assert (result.returncode, result.stderr) == (2, message)
    assert (checkout / ".cache/image").exists()


def test_clean_keeps_the_record_of_what_it_does_not_undo(checkout: Path) -> None:
    """A retained bucket keeps the pool, its LXD, and the limits that root raised."""
    (socket := checkout / "socket").touch()
    write_tools(checkout)
    python = checkout / ".venv/bin/python"
    python.write_text(f"{python.read_text()}\n[ $2 != infra.lxd.pool ]\n")
    write_program(checkout / "bin/python3", "exit 0")  # LXD answers
    (limits := checkout / ".cache/lxd/limits").parent.mkdir(parents=True)
    limits.write_text(f"{checkout}/limit 1\n")
    (checkout / ".cache/mnist").mkdir()
    result = run_clean(checkout, socket)
    assert (result.returncode, result.stderr) == (0, "")
    assert "clean: .cache/lxd stays, with the kernel's limits and the LXD to undo" in result.stdout
    assert [path.name for path in (checkout / ".cache").iterdir()] == ["lxd"]
    assert limits.exists()
    limits.unlink()
    write_tools(checkout)
    assert ".cache/lxd stays" not in run_clean(checkout, socket).stdout
    assert not (checkout / ".cache").exists()


def run_demo(root: Path, exported: str, claimed: str = "", left: int = 3) -> subprocess.CompletedProcess[str]:
    write_tools(root, f"if [ $3$4 = --claimeddemo ]; then echo '{claimed}'; else exit {left}; fi")
    (root / "exported").write_text(exported)
    write_program(root / "bin/make", 'echo "${PULUMI_BACKEND_URL:-here}" >made')
    return run_script(root, "setup/demo.sh", PULUMI_BACKEND_URL="gs://team")


def test_a_demo_does_not_touch_resources_of_others(checkout: Path) -> None:
    """Refuse a state with resources, or a retained bucket; use this checkout's state, never a team's."""
    result = run_demo(checkout, '{"deployment": {"resources": [{"urn": "urn:pulumi:demo"}]}}')
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "stack demo has resources already: `pulumi destroy --stack demo` first, or `make demo STACK=other`" in result.stderr
    assert (checkout / "made").read_text() == "here\n"
    result = run_demo(checkout, '{"deployment": {}}', "project scaletier-demo-bbbbbb")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "already (project scaletier-demo-bbbbbb): `make demo STACK=other` leaves it alone" in result.stderr
    assert (checkout / "pulumi.log").read_text().splitlines() == ["stack export here"] * 2


def test_a_demo_has_the_steps_of_the_quickstart(checkout: Path) -> None:
    write_program(checkout / ".venv/bin/fab", "echo Final metrics after 2000 steps: accuracy: 0.98")
    shown = re.findall(r"^\$ (\w+ \w+)", run_demo(checkout, "{}", left=0).stdout, re.MULTILINE)
    quickstart = (SETUP.parent / "README.md").read_text().partition("## Quickstart")[2].partition("`make demo`")[0]
    steps = re.findall(r"^((?:fab|pulumi) (?!config)\w+)", quickstart, re.MULTILINE)
    assert [step for step in shown if step in steps] == steps


def test_a_demo_ends_with_the_next_commands(checkout: Path) -> None:
    """Print them once no resources remain, and only if the model is accurate."""
    for accuracy, code in (("0.98", 0), ("0.50", 1)):
        write_program(checkout / ".venv/bin/fab", f'echo "12:00:00 INFO Final metrics after 2000 steps: accuracy: {accuracy}"')
        result = run_demo(checkout, '{"deployment": {}}', left=0)
        assert result.returncode == code, result.stderr
        _, nothing_left, following = result.stdout.partition("Nothing is left:")
        commands = [line.split("  ")[1] for line in following.splitlines() if line.startswith("  ")]
        assert nothing_left
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
            if code == 0
            else []
        )


def test_a_demo_reports_only_what_it_has_left(checkout: Path) -> None:
    """Bridges and processes of an LXD in a container may be in sight of this machine."""
    write_program(checkout / ".venv/bin/fab", "echo Final metrics after 2000 steps: accuracy: 0.98")
    assert run_demo(checkout, '{"deployment": {}}').returncode == 3, "it is unknown what is there"
    assert "up" not in (checkout / "pulumi.log").read_text().split()
    strangers, own = "network stffffff; nft table scaletier_ffffff", "network staaaaaa; process 7 (dnsmasq staaaaaa)"
    for left, code, message in (("", 0, ""), (f"{own}; ", 1, f"demo: destroy left behind: {own}\n")):
        (checkout / "pulumi.log").unlink()
        listed = f"if grep -q ^destroy pulumi.log; then echo '{left}{strangers}'; else echo '{strangers}'; fi"
        write_tools(checkout, f"[ $3 != --claimed ] || exit 0; {listed}")
        result = run_script(checkout, "setup/demo.sh")
        assert (result.returncode, result.stderr) == (code, message), result.stdout


def test_a_demo_whose_terminal_closes_destroys_its_hosts(checkout: Path) -> None:
    """Pulumi gets SIGHUP too, and may leave its lock."""
    write_tools(checkout)
    (checkout / "exported").touch()
    pulumi = checkout / ".venv/bin/pulumi"
    pulumi.write_text(f"{pulumi.read_text()}\n[ $1 != up ] || {{ until [ -e closed ]; do sleep 0.05; done; kill -HUP 0; }}\n")
    write_program(checkout / "bin/make", "exit 0")
    environment = {"PATH": f"{checkout}/bin:{BASE}", "HOME": str(checkout)}
    with subprocess.Popen(
        [checkout / "setup/demo.sh"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as demo:
        assert demo.stdout is not None
        assert any(b"$ pulumi up" in line for line in demo.stdout)
        demo.stdout.close()
        (checkout / "closed").touch()
        assert demo.wait(limit()) == 129
    commands = [" ".join(line.split()[:2]) for line in (checkout / "pulumi.log").read_text().splitlines()]
    assert commands[-3:] == ["cancel --yes", "config rm", "destroy --yes"]


def test_files_of_root_in_the_cache_get_the_checkout_s_owner(checkout: Path) -> None:
    (checkout / ".cache/lxd").mkdir(parents=True)
    write_program(checkout / "bin/chown", 'echo "$@"')
    owner = f"{checkout.stat().st_uid}:{checkout.stat().st_gid}"
    calls = run_common(checkout, "owned .cache/lxd").stdout.splitlines()
    assert calls == [f"{owner} {checkout}/.cache", f"-R {owner} .cache/lxd"]


def test_limits_raised_by_root_are_restored_only_by_root(checkout: Path) -> None:
    (limits := checkout / ".cache/lxd/limits").parent.mkdir(parents=True)
    limits.write_text(f"{checkout}/limit 1\n")
    write_program(checkout / "bin/id", "echo 1000")
    write_program(checkout / "bin/rm", "exit 1")
    result = run_script(checkout, "setup/lxd.sh", "down", SCALETIER_LXD_SOCKET=str(checkout / "none"), SETUP_ALONE="lxd")
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "`sudo setup/lxd.sh down` first" in result.stderr
    assert not (checkout / "limit").exists()


def test_a_part_of_set_up_waits_for_that_of_another_checkout(checkout: Path) -> None:
    """SIGTERM reaches the holder of the lock itself."""
    common = checkout / "setup/common.sh"
    common.write_text(common.read_text().replace("/run/lock/", f"{checkout}/lock-"))

    def start(script: str) -> subprocess.Popen[str]:
        command = ["sh", "-euc", f"part=test; . setup/common.sh; alone test; {script}"]
        return subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True)

    with start("echo $$; while :; do sleep 0.05; done") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == f"{first.pid}\n", "make's SIGTERM reaches the holder itself"
        with start("echo $$") as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "test: waiting for the set-up of this or another checkout\n"
            first.terminate()
            assert second.stdout.readline() == f"{second.pid}\n"


@pytest.mark.parametrize("script", ["venv", "pulumi-cli", "stack", "data", "runtime", "fake-gcs"])
def test_a_part_of_set_up_waits_for_that_of_the_same_checkout(checkout: Path, script: str) -> None:
    """Two new passphrases, or two environments in one folder, would destroy one another."""
    write_recipe(checkout)
    lock = checkout / ".cache/locks" / script.removesuffix("-cli")
    lock.mkdir(parents=True)
    held = os.open(lock, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    environment = {"PATH": f"{checkout}/bin:{BASE}", "HOME": str(checkout)}
    command = [checkout / f"setup/{script}.sh"]
    with subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{lock.name}: waiting for the set-up of this checkout\n"
        process.kill()
    os.close(held)


def test_a_daemon_does_not_hold_the_lock_of_set_up(checkout: Path) -> None:
    places = {"/run/lock/": f"{checkout}/lock-", "/etc/sub": f"{checkout}/sub", "/var/lib/lxcfs": f"{checkout}/lxcfs"}
    for file in (write_lxd_tools(checkout), checkout / "setup/common.sh"):
        text = file.read_text()
        for place, other in places.items():
            text = text.replace(place, other)
        file.write_text(text)
    for name in ("subuid", "subgid"):
        (checkout / name).write_text("root:1:1\n")
    write_program(checkout / "bin/setsid", 'echo "$1 $(ls /proc/$$/fd)" | tr "\\n" " " >"$1.fds"')
    write_program(checkout / "bin/lxd", "until [ -s lxd.fds ] && [ -s lxcfs.fds ]; do sleep 0.01; done; ls /proc/$$/fd; exit 1")
    result = run_script(checkout, "setup/lxd.sh", "system", SCALETIER_LXD_SOCKET=str(checkout / "none"))
    assert "LXD did not start" in result.stderr
    assert "9" in result.stdout.split(), "the script holds it"
    for daemon in ("lxd", "lxcfs"):
        assert "9" not in (checkout / f"{daemon}.fds").read_text().split()


def test_a_failed_image_leaves_no_files_of_root(checkout: Path) -> None:
    (checkout / "ansible").mkdir()
    write_program(checkout / "bin/id", "echo 0")
    write_program(checkout / "bin/chown", 'echo "$@" >>owned')
    image = '[ "$2" != infra.lxd.image ] || exit 1'
    write_program(checkout / ".venv/bin/python", f'{image}; exec {sys.executable} "$@"')
    write_program(checkout / ".venv/bin/ansible-playbook", "exit 7")
    write_nice(checkout)
    result = run_script(checkout, "setup/image.sh", SETUP_ALONE="image")
    assert result.returncode == 7, result.stderr
    cache = checkout / ".cache"
    owned = "".join(path.read_text() for path in checkout.glob("**/owned")).split()
    assert {str(cache), f"{cache}/image", f"{cache}/image.log"} <= {*owned}


def write_lxd_tools(root: Path) -> Path:
    """Create the programs that set-up needs to start LXD without systemd; return the script that does."""
    (script := root / "setup/lxd.sh").write_text(script.read_text().replace("/run/systemd/system", "/nowhere"))
    for name in ("nft", "mksquashfs", "mmdebstrap", "mkfs.btrfs", "chown", "mountpoint", "getent"):
        write_program(root / "bin" / name, "exit 1" if name == "mountpoint" else "")
    write_program(root / "bin/dpkg-query", "echo ok installed")
    write_program(root / "bin/id", "echo 0")
    return script


def test_a_killed_lxcfs_is_unmounted_in_any_language(checkout: Path) -> None:
    write_lxd_tools(checkout)
    for name, program in {
        "mkdir": 'case "$*" in */var/lib/lxcfs) exit 3 ;; esac; exec /bin/mkdir "$@"',
        "stat": "[ ${LC_ALL:-} = C ] && echo is not connected || echo ist nicht verbunden",
        "umount": 'echo "$@"; exit 4',
    }.items():
        write_program(checkout / "bin" / name, program)
    none = str(checkout / "none")
    result = run_script(checkout, "setup/lxd.sh", "system", SCALETIER_LXD_SOCKET=none, SETUP_ALONE="lxd", LANG="de_DE.UTF-8")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (4, "-l /var/lib/lxcfs")


@pytest.mark.parametrize("importing", ["echo imported", "exit 3"])
def test_an_image_is_built_in_a_folder_with_a_space(checkout: Path, importing: str) -> None:
    root = checkout.rename(checkout.with_name("check out"))
    (root / "ansible").mkdir()
    write_program(root / "bin/id", "echo 0")
    write_program(
        root / ".venv/bin/python",
        f"""case $1$2$3 in
  -minfra.lxd.imageimport) {importing} ;; -minfra.lxd.image) exit 1 ;; *) exec {sys.executable} "$@" ;; esac""",
    )
    write_program(root / ".venv/bin/ansible-playbook", 'echo "$2 $3" >>ran; env >environment')
    write_nice(root)
    of_the_user = {"LC_ALL": "de_DE.UTF-8", "ANSIBLE_HOME": "/nowhere", "ANSIBLE_STRATEGY": "mine", "ANSIBLE_CONFIG": "/mine"}
    result = run_script(root, "setup/image.sh", SETUP_ALONE="image", **of_the_user)
    assert result.returncode == (3 if "exit" in importing else 0), result.stderr
    assert (root / "ansible/ran").read_text() == f"-e cache='{root}/.cache/image'\n" * 2
    assert (root / "niced").read_text() == "-n 5 ansible-playbook\n"
    environment = {*(root / "ansible/environment").read_text().splitlines()}
    settings = {"LC_ALL=C.UTF-8", "ANSIBLE_CONFIG=ansible.cfg", f"ANSIBLE_HOME={root}/.cache/image/ansible"}
    assert {line for line in environment if line.startswith(("LC_", "ANSIBLE_"))} == settings


def write_nice(root: Path) -> None:
    write_program(root / "bin/nice", f"""echo "$1 $2 ${{3##*/}}" >>"{root}/niced"; shift 2; exec "$@\"""")


def test_a_runtime_is_made_at_a_lower_priority(checkout: Path) -> None:
    made = "case $2 in infra.runtime) echo .cache/hosts/runtime-1 ;;"
    write_program(checkout / ".venv/bin/python", f'{made} *) exec {sys.executable} "$@" ;; esac')
    write_nice(checkout)
    result = run_script(checkout, "setup/runtime.sh")
    assert result.returncode == 0, result.stderr
    assert "runtime: the hosts' Python is made, " in result.stdout
    assert (checkout / "niced").read_text() == "-n 5 python\n"


def test_the_tests_use_no_repository_or_state_of_the_shell(checkout: Path) -> None:
    write_program(checkout / "setup/needs.sh", "exit 0")
    write_program(checkout / ".venv/bin/python", 'echo "$@"; env')
    names = ("PULUMI_BACKEND_URL", "PYTHONPATH", "MYPYPATH", "SCALETIER_PROJECT", "GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE")
    names += ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
    result = run_script(checkout, "setup/test.sh", "all", SET_UP="true", **dict.fromkeys(names, str(checkout / "other")))
    first, *variables = result.stdout.splitlines()
    assert (result.returncode, first) == (0, "tests/run.py all"), result.stderr
    assert not {*names} & {line.partition("=")[0] for line in variables}


def test_ctrl_c_in_the_set_up_of_tests_is_one_line(checkout: Path) -> None:
    write_program(checkout / "setup/needs.sh", "exit 0")
    write_program(checkout / "slow", "trap 'exit 130' INT; kill -INT 0; sleep 60")
    command = ["env", "--default-signal=INT", "setup/test.sh", "test"]
    environment = {"PATH": f"{checkout}/bin:{BASE}", "HOME": str(checkout), "SET_UP": "./slow"}
    result = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, start_new_session=True)
    message = "test: stopped in set-up; call it again to go on\n"
    assert (result.returncode, result.stdout, result.stderr) == (130, "", message)


def test_make_runs_all_tests_of_this_checkout(checkout: Path) -> None:
    shutil.copy(SETUP.parent / "Makefile", checkout)
    write_program(checkout / "setup/venv.sh", "exit 0")
    write_program(checkout / "setup/pulumi-cli.sh", "exit 0")
    write_program(checkout / "setup/stack.sh", 'echo "stack ${PULUMI_BACKEND_URL:-here}"')
    write_program(checkout / ".venv/bin/pytest", "env")
    names = ("PYTHONPATH", "MYPYPATH", "PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "CDPATH")
    names += ("PYTHONHOME", "PYTHONOPTIMIZE", "PYTHONSAFEPATH", "PYTHONWARNINGS")
    result = run_script(checkout, "make", "unit", PULUMI_BACKEND_URL="gs://team", **dict.fromkeys(names, "other"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("stack here\n"), "fab asks Pulumi for the stacks of this checkout"
    assert not {*names} & {line.partition("=")[0] for line in result.stdout.splitlines()}


def test_a_measurement_sets_up_no_state_of_a_team(checkout: Path) -> None:
    shutil.copy(SETUP.parent / "Makefile", checkout)
    for script in ("setup/needs.sh", "setup/venv.sh"):
        write_program(checkout / script, "exit 0")
    for script in ("setup/together.sh", ".venv/bin/python"):
        write_program(checkout / script, f'echo "{script} ${{PULUMI_BACKEND_URL:-here}}" >>urls')
    result = run_script(checkout, "make", "bench", PULUMI_BACKEND_URL="gs://team")
    assert result.returncode == 0, result.stderr
    assert (checkout / "urls").read_text().splitlines() == ["setup/together.sh here", ".venv/bin/python here"]
