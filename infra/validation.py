"""Check configuration by pydantic models; one line has each mistake: the path of the key, what is wrong and what is valid."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from infra.scale_tiers import suggest

_REFUSAL = "refusal"
_MAX_SHOWN = 100
_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")
# pydantic's words for a type, and plain words for a user who writes YAML.
_WORDS = {
    "a valid boolean": "true or false",
    "a valid dictionary": "a mapping of names",
    "a valid integer": "a whole number",
    "a valid list": "a list",
    "a valid number": "a number",
    "a valid string": "a string",
    "a valid tuple": "a list",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}


class Section(BaseModel):
    """A mapping of known keys; a key without a value counts as not given.

    If the validation context is a dict, it gets an item for each key that the input has by its old name: present to old name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, defer_build=True)

    old_names: ClassVar[Mapping[str, str]] = {}
    """Old names of keys by the present ones; a key is read by either."""
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Keys that are only known in order to refuse them, each with the remedy."""

    @classmethod
    def valid_keys(cls) -> list[str]:
        """Return the valid keys, the class's own before inherited ones."""
        names = sorted(cls.model_fields, key=lambda name: name not in cls.__annotations__)
        return [cls.model_fields[name].alias or name for name in names]

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, cls):
            return value
        keys = cls.valid_keys()
        valid = ", ".join(keys)
        if not isinstance(value, dict | None):
            raise refusal(f"is not a mapping of keys to values; valid keys are {valid}")
        value = dict(value or {})
        for new, old in cls.old_names.items():
            if old in value and new in value:
                raise refusal(f"is the old name of {new}, which is there too: remove it", old)
            if old in value:
                value[new] = value.pop(old)
                if info.context is not None:
                    info.context[new] = old
        if known := [key for key in value if key in cls.unsupported]:
            raise refusal(f"is not supported: {cls.unsupported[known[0]]}", known[0])
        given = {key: item for key, item in value.items() if item is not None}
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        if unknown := [str(key) for key in value if key not in fields]:
            raise refusal(f"is unknown{suggest(unknown[0], keys, 0.75)}; valid are {valid}", unknown[0])
        if missing := [key for key, field in fields.items() if field.is_required() and key not in given]:
            raise refusal(f"is missing: {fields[missing[0]].description}", missing[0])
        return given

    def given(self) -> dict[str, Any]:
        """Return the keys that were given, with their values."""
        return self.model_dump(exclude_unset=True)


def refusal(text: str, key: str = "") -> PydanticCustomError:
    """Return an error that is printed as a path and this text, without the value; `key` extends the path."""
    # pydantic cannot show a key that is no UTF-8.
    text, key = (each.encode(errors="replace").decode() for each in (text, key))
    return PydanticCustomError(_REFUSAL, "{text}", {"text": text, "key": key})


def one_line(error: ValidationError, path: str, separator: str) -> str:
    """Return all mistakes in one line.

    Args:
        path: where the configuration is, such as `config.yaml`.
        separator: what stands between the path and a key.
    """
    return "; ".join(dict.fromkeys(_format_error(item, path, separator) for item in error.errors(include_url=False)))


def _format_error(item: ErrorDetails, path: str, separator: str) -> str:
    context: dict[str, Any] = item.get("ctx", {})
    keys = _path([*item["loc"], *([context["key"]] if context.get("key") else [])])
    where, value, text = f"{path}{separator}{keys}" if keys else path, item["input"], item["msg"]
    if item["type"] == _REFUSAL:
        return f"{where} {text}"
    if "expected" in context:
        return f"{where} {_show(value)} is unknown; valid are {_list(context['expected'])}"
    text = text.removeprefix("Value error, ")
    if text.startswith("Input should be "):
        text = text.replace("Input should be", "must be").partition(", ")[0]
        for word, plain in _WORDS.items():
            text = text.replace(word, plain)
        if text.endswith("a list") and isinstance(value, str | int | float):
            text = f"{text} such as [{', '.join(_WORD.findall(str(value)))}]"
        quote = ": quote it" if item["type"] == "string_type" and not isinstance(value, list | dict) else ""
        return f"{where} {text}, not {_show(value)}{quote}"
    if text.startswith("must be "):
        return f"{where} {text}, not {_show(value)}"
    return f"{where} {_show(value)} is invalid: {text}"


def _path(keys: Sequence[str | int]) -> str:
    """Return the path of a value: `trainingInput.args[0]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys if key != "[key]").removeprefix(".")


def _list(expected: str) -> str:
    """Return pydantic's `'a', 'b' or 'c'` as `a, b, c`."""
    return expected.replace("'", "").replace(" or ", ", ")


def _show(value: object) -> str:
    try:
        return repr(value)[:_MAX_SHOWN]
    except ValueError:
        return "a number too large to show"
