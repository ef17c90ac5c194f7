"""Check the documentation: sizes, line lengths, links, commands, keys, and the terms of the glossary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from invoke import Collection
from pydantic.alias_generators import to_camel

import fabfile
from infra.gcp.config import GcpConfig
from infra.lxd.config import LxdConfig
from ops.submit.schema import JobConfig, Scheduling, TrainingInput

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in ("tests/benchmarks", "docs", "examples") for page in (ROOT / folder).rglob("*.md")),
]
SOURCES = "ansible examples hosts infra jobs ops scaletier setup templates tests/benchmarks trainer"
MOST_BYTES = {"README.md": 7_000, "ARCHITECTURE.md": 12_000}
MOST, MOST_OF_CODE = 100, 120
MOST_WORDS = 20
COMMAND = r"^(?:\$ )?(make|fab) ([a-z][\w-]*)"
CALL = r"^(?:\$ )?fab ([a-z][\w-]*)(.*)"
COLLECTION = Collection.from_module(fabfile)
TASKS = set(COLLECTION.task_names)
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def lines(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it is in a code block."""
    code = False
    for line in page.read_text().splitlines():
        is_fence = line.lstrip().startswith("```")
        yield line, code or is_fence
        code ^= is_fence


def prose(page: Path) -> list[str]:
    return [line for line, code in lines(page) if not code]


def code(page: Path) -> str:
    """Return code blocks and inline code, one piece per line."""
    blocks = [line for line, code in lines(page) if code]
    return "\n".join([*blocks, *re.findall(r"`([^`]+)`", "\n".join(prose(page)))])


def fab_options(words: str) -> list[str]:
    """Return the options of a task, without the trainer's after --, quoted values and comments."""
    task_words = re.sub(r'"[^"]*"', "", re.split(" (?:--|#) ", words)[0])
    return [option.removeprefix("no-") for option in re.findall(r"(?<=\s)--([a-z][\w-]*)", task_words)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings in GitHub's form."""
    headings = [line.lstrip("#").strip().replace("`", "") for line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Return the relative links of a page."""
    targets = re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(page)))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def resolves(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not anchor or anchor in anchors(target))


def source_files() -> list[Path]:
    files = [path for folder in SOURCES.split() for path in (ROOT / folder).rglob("*") if path.suffix not in (".md", ".pyc")]
    return [path for path in files if path.is_file() and path.suffix in (".py", ".sh", ".yaml", ".yml", ".j2", ".conf", "")]


@pytest.mark.parametrize("name", MOST_BYTES)
def test_frequently_read_pages_are_short(name: str) -> None:
    assert len((ROOT / name).read_bytes()) <= MOST_BYTES[name]


def test_lines_are_short() -> None:
    long = [(page.name, line) for page in PAGES for line, code in lines(page) if len(line) > (MOST_OF_CODE if code else MOST)]
    assert [(name, line) for name, line in long if not line.startswith("|")] == []


def test_table_cells_are_short() -> None:
    cells = [(page.name, cell) for page in PAGES for line in prose(page) if line.startswith("|") for cell in line.split("|")]
    assert [(name, cell) for name, cell in cells if len(cell.split()) > MOST_WORDS] == []


def test_relative_links_resolve() -> None:
    assert [(page.name, link) for page in PAGES for link in links(page) if not resolves(page, link)] == []


def test_commands_exist() -> None:
    known = {"make": TARGETS, "fab": TASKS}
    commands = [(page.name, *pair) for page in PAGES for pair in re.findall(COMMAND, code(page), re.MULTILINE)]
    assert [(page, program, name) for page, program, name in commands if name not in known[program]] == []


def test_options_exist() -> None:
    known = {name: {flag for each in COLLECTION[name].get_arguments() for flag in each.names} for name in TASKS}
    calls = [(page.name, *call) for page in PAGES for call in re.findall(CALL, code(page), re.MULTILINE)]
    used = [(page, task, option) for page, task, rest in calls if task in TASKS for option in fab_options(rest)]
    assert [(page, task, option) for page, task, option in used if option not in known[task]] == []


def test_readme_has_commands_and_links() -> None:
    readme = ROOT / "README.md"
    assert {"make setup", "fab train", "fab logs", "fab get"} <= {
        " ".join(line.split()[:2]) for line in code(readme).splitlines()
    }
    assert {"docs/library.md", "docs/google-cloud.md", "ARCHITECTURE.md", "LICENSE"} <= set(links(readme))


def section(page: str, heading: str) -> list[str]:
    """Return the lines below a heading, up to the next one of the same level."""
    found = (ROOT / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return found.strip().splitlines()


def test_one_table_lists_what_is_sent_to_a_host_and_one_how_a_job_ends() -> None:
    sent = section("docs/trainers.md", "What is sent to a host")
    assert sent[0] == "| what | on the host | transfer | lifetime |"
    ends = section("docs/trainers.md", "How a job ends")
    assert next(line for line in ends if line.startswith("|")) == "| a replica ends | consequence |"


def test_the_readme_and_the_example_run_pytorch_by_the_same_two_commands() -> None:
    of_readme, of_example = (
        [line for line, is_code in lines(ROOT / page) if is_code and "ddp01" in line]
        for page in ("README.md", "examples/torch/README.md")
    )
    assert of_readme == of_example
    assert [line.split()[:2] for line in of_readme] == [["fab", "train"], ["fab", "get"]]


def test_pages_named_in_the_code_exist() -> None:
    named = {name for path in source_files() for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(errors="replace"))}
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_code_uses_every_term_of_the_glossary() -> None:
    glossary = (ROOT / "ARCHITECTURE.md").read_text().partition("## Glossary")[2]
    terms = re.findall(r"^\| `([^`]+)` \|", glossary, re.MULTILINE)
    sources = "\n".join(path.read_text(errors="replace") for path in source_files())
    assert terms
    # The term comes first in the pattern: a search for a literal prefix is quick.
    assert [term for term in terms if not re.search(rf"{term}\b(?<!\w{term})", sources)] == []


def test_the_reference_lists_every_command() -> None:
    listed = set(re.findall(r"`fab ([a-z][\w-]*)", (ROOT / "docs/cli.md").read_text()))
    assert listed == TASKS


@pytest.mark.parametrize(
    ("page", "keys"),
    [
        ("config.md", {key for model in (JobConfig, TrainingInput, Scheduling) for key in model.valid_keys()}),
        ("config.md", set(map(to_camel, LxdConfig.model_fields))),
        ("google-cloud.md", set(map(to_camel, GcpConfig.model_fields))),
        ("from-ai-platform.md", {*TrainingInput.unsupported}),
    ],
    ids=["job", "local", "google", "refused"],
)
def test_the_reference_lists_every_key(page: str, keys: set[str]) -> None:
    words = set(re.findall(r"\w+", code(ROOT / "docs" / page)))
    assert keys - words == set()


def test_the_index_lists_every_example() -> None:
    index = (ROOT / "examples/README.md").read_text()
    examples = [path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert [name for name in examples if f"({name}/" not in index] == []
