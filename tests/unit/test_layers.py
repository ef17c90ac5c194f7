"""Check which packages and libraries each package imports."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from jobs.batch_request import Request
from ops.models import batch, server
from ops.package import host_stream
from scaletier import flags as library_flags
from trainer.flags import parser

ROOT = Path(__file__).resolve().parents[2]
# Flags of any trainer (docs/trainers.md), and flags that fab has too.
SHARED_FLAGS = {"-h", "--help", "--strategy", "--job-dir", "--output_path", "--output-dir", "--model"}
OUR_PACKAGES = frozenset({"fabfile", "hosts", "infra", "jobs", "ops", "scaletier", "trainer"})

# The allowed imports of our own packages: a folder, or one module of it.
ALLOWED_MODULES = {
    "infra": {"infra", "jobs.queue", "jobs.paths", "jobs.serialization", "jobs.records", "jobs.times"},
    "jobs": {"jobs"},
    "ops": {
        "ops",
        "jobs",
        "infra.backend",
        "infra.scale_tiers",
        "infra.ports",
        "infra.templates",
        "infra.connection",
        "infra.findings",
        "infra.inventory",
        "infra.runtime.uv",
        "infra.runtime.atomic_dir",
        "infra.validation",
    },
    "fabfile.py": {"ops.cli"},
    "hosts/agent": {"hosts.agent", "jobs"},
    "hosts/serving": {"hosts.serving", "jobs"},
    "hosts/batch": {
        "hosts.batch",
        "hosts.serving.rest",
        "hosts.serving.saved",
        "jobs.batch_request",
        "jobs.model_download",
        "jobs.model_signatures",
    },
    "scaletier": {"scaletier"},
    "trainer": {"trainer", "scaletier"},
    "hosts/tuner": {
        "hosts.tuner",
        "jobs",
        "hosts.agent.config",
        "hosts.agent.replica_rules",
        "hosts.agent.launcher_client",
        "hosts.agent.process",
    },
}
# The packages of ops in the order of the data flow: each imports those before it, or only what the table below lists.
OPS_PACKAGES = ("cluster", "package", "logs", "screen", "submit", "models", "show", "plan", "report", "cli")
ALLOWED_OPS_MODULES = {
    "package": {"cluster.root_helper", "cluster.host_files", "cluster.inventory"},
    "logs": {"cluster"},
    "screen": {"cluster", "logs"},
}
# The allowed libraries; the standard library is always allowed. A row of a module or package replaces that of its layer.
ALLOWED_LIBRARIES = {
    "infra": {
        "pulumi",
        "pulumi_gcp",
        "pulumi_policy",
        "pylxd",
        "google",
        "requests",
        "jinja2",
        "pydantic",
        "pydantic_core",
        "cryptography",
        "psutil",
        "uv",
        "yaml",
    },
    "ops": set(),
    "ops/config_values.py": {"yaml", "pydantic"},
    "ops/cli/commandline.py": {"fabric", "invoke"},
    "ops/cluster": {"fabric", "paramiko"},
    "ops/package": {"packaging", "pathspec", "pydantic"},
    "ops/submit/schema.py": {"pydantic"},
    "ops/models/client.py": {"paramiko"},
    "ops/models/tensorboard.py": {"paramiko"},
    "ops/report/charts.py": {"vl_convert"},
    "ops/report/page.py": {"jinja2", "markupsafe"},
    "ops/screen": {"rich"},
    "ops/show/top.py": {"rich"},
    "ops/cli/start.py": {"invoke"},
    "ops/cli/task.py": {"fabric"},
    "fabfile.py": set(),
    "jobs": set(),
    "jobs/gcs_bucket.py": {"google.api_core", "google.auth", "google.cloud.storage"},
    "hosts/agent": set(),
    "hosts/agent/token_broker.py": {"google.auth", "urllib3"},
    "hosts/agent/facts.py": {"fsspec"},
    "hosts/agent/keep_unsaved.py": {"fsspec"},
    "hosts/serving": {"numpy", "orjson"},
    "hosts/serving/__main__.py": {"uvicorn"},
    "hosts/serving/app.py": {"starlette", "prometheus_client", "orjson"},
    "hosts/serving/saved.py": {"numpy"},
    "hosts/batch": {"numpy", "orjson"},
    "hosts/batch/shards.py": set(),
    "scaletier": {"tensorflow", "keras", "numpy"},
    "trainer": {"tensorflow", "keras", "numpy"},
    "trainer/tfrecord.py": {"google_crc32c"},
    "hosts/tuner": set(),
    "hosts/tuner/measure.py": {"fsspec", "tensorboard"},
    "hosts/tuner/suggest.py": {"optuna"},
}


def imports(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], node.module or ""]) if node.level else node.module or ""
            # `from infra import ports` imports infra.ports.
            top = (ROOT / base.replace(".", "/")).is_dir() and base.partition(".")[0] in OUR_PACKAGES
            yield from (f"{base}.{alias.name}" for alias in node.names) if top else (base,)


def files() -> list[tuple[str, Path]]:
    layers = [(layer, path) for layer in ALLOWED_MODULES for path in sorted((ROOT / layer).rglob("*.py"))]
    return [*layers, ("fabfile.py", ROOT / "fabfile.py")]


@pytest.mark.parametrize(("layer", "path"), files(), ids=lambda value: value.name if isinstance(value, Path) else value)
def test_a_layer_imports_only_allowed_modules(layer: str, path: Path) -> None:
    relative = path.relative_to(ROOT)
    libraries = ALLOWED_LIBRARIES.get(
        relative.as_posix(), ALLOWED_LIBRARIES.get(relative.parent.as_posix(), ALLOWED_LIBRARIES[layer])
    )
    for name in imports(path):
        top = name.partition(".")[0]
        if top in OUR_PACKAGES or top not in sys.stdlib_module_names:
            allowed_names = ALLOWED_MODULES[layer] if top in OUR_PACKAGES else libraries
            assert any(f"{name}.".startswith(f"{allowed}.") for allowed in allowed_names), f"{path} imports {name}"


def test_each_module_that_a_host_gets_comes_with_those_that_it_imports() -> None:
    agent = host_stream.code(ROOT)[0]
    model_server = [file.path.removeprefix(f"{server._NEW_CODE}/") for file in server._files(ROOT, "")]
    batch_job = batch.build_program(Request((), {})).source.files
    for names in (agent, model_server, batch_job):
        sent = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names if name.endswith(".py")}
        for name in sent:
            path = ROOT / name.replace(".", "/")
            ours = {
                one
                for one in imports(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
                if one.partition(".")[0] in OUR_PACKAGES
            }
            assert not ours - sent, name


def test_there_are_no_import_cycles() -> None:
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for _, path in files()}
    TopologicalSorter({name: {*imports(path)} & modules.keys() for name, path in modules.items()}).prepare()


def test_fab_starts_and_follows_jobs_by_the_python_client() -> None:
    """Check that nothing else hands a job over, cancels it or follows it, so that programs and `fab` have one path."""
    names = {
        ("ops.submit", "submit"),
        ("ops.submit.submit", "submit"),
        ("ops.submit.claim", "Canceller"),
        ("ops.logs.follow", "Follower"),
    }
    sources = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_bytes()) for path in (ROOT / "ops").rglob("*.py")}
    nodes = [(path, node) for path, tree in sources.items() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {path for path, node in nodes for alias in node.names if (node.module, alias.name) in names} == {"ops/client.py"}


@pytest.mark.parametrize("path", sorted((ROOT / "ops").glob("*/*.py")), ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_a_package_of_ops_imports_only_earlier_ones(path: Path) -> None:
    package = path.parent.name
    allowed_names = {package, *ALLOWED_OPS_MODULES.get(package, OPS_PACKAGES[: OPS_PACKAGES.index(package)])}
    for name in imports(path):
        module = name.removeprefix("ops.")
        if name != module and module.partition(".")[0] in OPS_PACKAGES:
            assert any(f"{module}.".startswith(f"{allowed}.") for allowed in allowed_names), f"{path} imports {name}"


def test_every_package_of_ops_is_listed() -> None:
    assert {path.parent.name for path in (ROOT / "ops").glob("*/*.py")} == {*OPS_PACKAGES}
    others = [path for path in (ROOT / "ops").glob("*.py") if path.stem != "client"]
    shared = [name for path in others for name in imports(path) if name.startswith("ops.")]
    assert not [name for name in shared if name.split(".")[1] in OPS_PACKAGES], "shared modules import no package of ops"


def test_ops_does_not_depend_on_the_target() -> None:
    for path in sorted((ROOT / "ops").rglob("*.py")):
        constants = (node.value for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Constant))
        assert not {"lxd", "gcp", "target"} & {value for value in constants if isinstance(value, str)}, path


def test_other_packages_do_not_name_the_shipped_trainer() -> None:
    """Check the trainer's and the library's modules, strategies and flags: others read them from scaletier.yaml."""
    flags = {name for action in parser({})._actions for name in action.option_strings} - SHARED_FLAGS
    assert {name for action in library_flags.parser({})._actions for name in action.option_strings} - SHARED_FLAGS < flags
    modules = {f"{package}.{path.stem}" for package in ("trainer", "scaletier") for path in (ROOT / package).glob("*.py")}
    names = {*flags, *modules, "model-parallel"}
    for path in sorted(path for layer in ("ops", "jobs", "hosts/agent") for path in (ROOT / layer).rglob("*.py")):
        if path.parent.name == "cli":  # the help has flags of trainers as examples
            continue
        words = re.findall(r"--[\w-]+|\b(?:trainer|scaletier)\.\w+|model-parallel", path.read_text())
        assert not names & {*words}, path


def test_templates_of_ops_name_no_target() -> None:
    for name in ("tf_config.json.j2", "scaletier.conf.j2", "scaletier-timer.conf.j2"):
        text = (ROOT / "templates" / name).read_text().lower()
        assert "lxd" not in text
        assert "gcp" not in text
