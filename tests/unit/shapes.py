"""docs/json.md as data, and whether a value of JSON is as it says."""

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
# Who prints JSON, and what of the page tells of it; by a key that the value has where there are several, "" for any other.
PRINTED: Mapping[str, str | Mapping[str, str]] = {
    "ops.cluster.inventory.connect": "fab connect",
    "ops.models.export._show": "fab export",
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
    "ops.submit.train.run_submission": "fab train, fab cancel, fab wait, fab predict --batch",
    "ops.submit.end.wait": "fab train, fab cancel, fab wait, fab predict --batch",
}


@cache
def documented() -> dict[str, Section]:
    """Return the types of keys by path, by heading."""
    found: dict[str, dict[str, str]] = {}
    for line in DOCS.read_text().splitlines():
        if line.startswith("## "):
            found[line.removeprefix("## ")] = section = {}
        elif row := _ROW.match(line):
            section |= dict.fromkeys(re.findall(r"`(.+?)`", row[1]), row[2])
    return found


def anchor(heading: str) -> str:
    """Return the heading as links name it."""
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
    below = {told.removeprefix(path) for told in section if told.startswith(path) and told not in (path, ".")}
    if isinstance(value, list) and any(told.startswith("[]") for told in below):
        for item in value:
            yield from wrong(item, section, f"{path}[]")
    elif isinstance(value, list):
        yield f"{path or '.'} is an array, which is not documented"
    elif isinstance(value, dict) and any(told.startswith("{}") for told in below):
        for item in value.values():
            yield from wrong(item, section, f"{path}{{}}")
    elif isinstance(value, dict):
        names = {re.split(r"[.\[{]", told.removeprefix("."))[0] for told in below if path == "" or told.startswith(".")}
        yield from (f"{path}.{name} is not documented".removeprefix(".") for name in value.keys() - names)
        needed = {name for name in names if "absent" not in section.get(f"{path}.{name}".removeprefix("."), "")}
        yield from (f"{path}.{name} is missing".removeprefix(".") for name in needed - value.keys())
        for name in value.keys() & names:
            yield from wrong(value[name], section, f"{path}.{name}".removeprefix("."))
    elif kind is None:
        yield f"{path or '.'} is {value!r}, which is not documented"


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _KINDS[name]) and (name == "boolean" or not isinstance(value, bool))


def check(caller: str, value: Any) -> None:
    """Assert that a function of ops prints what the page documents."""
    assert caller in PRINTED, f"{caller} prints JSON of which docs/json.md knows nothing"
    told = PRINTED[caller]
    heading = told if isinstance(told, str) else next(told[key] for key in told if key in value or not key)
    found = list(wrong(value, documented()[heading]))
    assert not found, f"{heading}, in docs/json.md: {'; '.join(found)}"
