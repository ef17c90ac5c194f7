"""Parse docs/json.md, and compare JSON values with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs" / "json.md"
_ROW = re.compile(r"^\| (`.+?`) \| (.+?) \| .+ \|$")
_LINK = re.compile(r"\[\w+\]\(#([\w-]+)\)")
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
    "absent": (),
}
Section = Mapping[str, str]
# The headings of docs/json.md by function that prints JSON. Of several headings, the value's keys decide; "" is the default.
PRINTED: Mapping[str, str | Mapping[str, str]] = {
    "ops.cluster.inventory.connect": "fab connect",
    "ops.models.export._print_signatures": "fab export",
    "ops.models.predict.predict": "fab predict",
    "ops.models.versions._report_version": "fab deploy, fab set-default, fab undeploy",
    "ops.models.versions.delete_version": "fab delete-version",
    "ops.models.deploy.deploy": "fab deploy, fab set-default, fab undeploy",
    "ops.models.versions.models": "fab models",
    "ops.models.versions.versions": "fab versions",
    "ops.plan.plan.plan": "fab plan",
    "ops.plan.planned._show": "fab plan --job",
    "ops.report.bundle.bundle": "fab bundle",
    "ops.report.command.report": {"reports": "fab report of several jobs", "": "fab report"},
    "ops.show.cost.cost": "fab cost",
    "ops.show.doctor.doctor": "fab doctor",
    "ops.show.fetch.get": "fab get",
    "ops.show.top.top": "fab top",
    "ops.show.jobs.describe": "fab describe",
    "ops.show.hosts.hosts": "fab hosts",
    "ops.show.jobs.jobs": "fab jobs",
    "ops.submit.end.cancel": "fab train, fab cancel, fab wait, fab predict --batch",
    "ops.submit.data.data": {"uploaded": "fab data put", "removed": "fab data rm", "": "fab data"},
    "ops.submit.end._delete": "fab delete, fab prune",
    "ops.submit.end.prune": "fab delete, fab prune",
    "ops.submit.runtimes.runtimes": {"removed": "fab runtimes rm", "": "fab runtimes"},
    "ops.submit.preview.show": "fab train --dry-run",
    "ops.submit.reproduce._show": "fab reproduce",
    "ops.submit.runner.run_submission": "fab train, fab cancel, fab wait, fab predict --batch",
    "ops.submit.end.wait": "fab train, fab cancel, fab wait, fab predict --batch",
}


@cache
def documented() -> dict[str, Section]:
    """Return the types of keys by path, by heading."""
    sections: dict[str, dict[str, str]] = {}
    for line in DOCS.read_text().splitlines():
        if line.startswith("## "):
            sections[line.removeprefix("## ")] = section = {}
        elif row := _ROW.match(line):
            section |= dict.fromkeys(re.findall(r"`(.+?)`", row[1]), row[2])
    return sections


def anchor(heading: str) -> str:
    """Return the heading's anchor, as links have it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def wrong(value: Any, section: Section, path: str = "") -> Iterator[str]:
    """List a JSON value's differences from its documentation: wrong types, unknown keys, missing keys."""
    kind = section.get(path or ".")
    if kind == "any":
        return
    if kind and (link := _LINK.fullmatch(kind.removesuffix(" or null"))):
        if value is None and kind != link[0]:
            return
        (linked,) = (other for heading, other in documented().items() if anchor(heading) == link[1])
        yield from (f"{path or '.'}: {problem}" for problem in wrong(value, linked))
        return
    if kind and not any(_is(value, name) for name in kind.split(" or ")):
        yield f"{path or '.'} is {value!r}, and not {kind}"
    if value is None:
        return
    keys = {key.removeprefix(path) for key in section if key.startswith(path) and key not in (path, ".")}
    if isinstance(value, list) and any(key.startswith("[]") for key in keys):
        for item in value:
            yield from wrong(item, section, f"{path}[]")
    elif isinstance(value, list):
        yield f"{path or '.'} is an array, which is not documented"
    elif isinstance(value, dict) and any(key.startswith("{}") for key in keys):
        for item in value.values():
            yield from wrong(item, section, f"{path}{{}}")
    elif isinstance(value, dict):
        names = {re.split(r"[.\[{]", key.removeprefix("."))[0] for key in keys if path == "" or key.startswith(".")}
        yield from (f"{path}.{name} is not documented".removeprefix(".") for name in value.keys() - names)
        required = {name for name in names if "absent" not in section.get(f"{path}.{name}".removeprefix("."), "")}
        yield from (f"{path}.{name} is missing".removeprefix(".") for name in required - value.keys())
        for name in value.keys() & names:
            yield from wrong(value[name], section, f"{path}.{name}".removeprefix("."))
    elif kind is None:
        yield f"{path or '.'} is {value!r}, which is not documented"


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _KINDS[name]) and (name == "boolean" or not isinstance(value, bool))


def check(caller: str, value: Any) -> None:
    """Assert that the JSON of a function of ops is as documented."""
    assert caller in PRINTED, f"{caller} prints JSON that docs/json.md does not document"
    headings = PRINTED[caller]
    heading = headings if isinstance(headings, str) else next(headings[key] for key in headings if key in value or not key)
    problems = list(wrong(value, documented()[heading]))
    assert not problems, f"{heading}, in docs/json.md: {'; '.join(problems)}"
