"""The reference of `handrail.toml`, made from the classes that read it.

python tools/configuration.py            writes docs/reference/configuration.md
python tools/configuration.py --print    prints it instead
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import NODEFAULT, UNSET, Meta, Struct, UnsetType
from msgspec.json import encode
from msgspec.structs import FieldInfo, fields

import handrail.guards
from handrail.config import Config
from handrail.gateway.settings import AuthSettings, UpstreamSettings
from handrail.guards.predicates import Predicate

__all__ = ["PAGE", "page"]

IN_PYTHON = {
    UpstreamSettings: " In Python: options of `Server.include`.",
    AuthSettings: " In Python: `auth=OAuth(…)`.",
}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "configuration.md"
WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any value"}
INTRODUCTION = """\
<!-- Made by tools/configuration.py from the classes that read the file. Do not edit. -->
# Configuration

`handrail serve`, `gateway`, `check`, `explain` and `approve` read the `handrail.toml` beside the served file, else that
of the working folder, or the file that `--config` names. `serve` and `gateway` say at their start which file is in
force, and what it switches off. A file beside the server that is not used is an error; `--config FILE --config-only`
means `FILE` alone. `server.run()` in Python reads no file, and warns of one beside it.

Everything in it is optional; what it does not say has the default below. What the file says wins over
what the server's author wrote in Python. An unknown key is an error that names the closest one.
[`handrail check`](cli.md) says whether a file is right, what is in force, and from where;
[examples/everyday.toml](../../examples/everyday.toml) has all of it to copy from.

Paths are read from the folder of the file. In Python the same values go to
[`Server`](server.md#guards): a section's class is named beside it.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for each in fields(Config):
        parts += _section(each.name, each)
    return "\n".join(parts)


def _section(path: str, key: FieldInfo) -> Iterator[str]:
    kind = _plain(key.type)
    told = _description(key.type)
    match get_origin(kind):
        case None:
            yield from _table(f"## `[{path}]`", kind)
        case origin if origin is list:
            [inner] = get_args(kind)
            yield from _table(f"## `[[{path}]]`", inner, told)
            yield from _table(f"### `{path}.arguments.PATH`", Predicate)
        case _ if (inner := _struct(kind)[1]) is not None:
            yield from _table(f"## `[{path}.NAME]`", inner, told)
        case _:
            value = _type(get_args(kind)[1])
            yield f"## `[{path}]`\n\n{told}\n\n| key | type |\n|---|---|\n| a name | {value} |\n"


def _table(heading: str, kind: type[Struct], told: str = "") -> Iterator[str]:
    """A section, and those inside it; what several keys have in common is told once."""
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    inside: dict[type[Struct], list[str]] = {}
    path = heading.strip("#` []")
    for key in fields(kind):
        rows.append(f"| `{key.encode_name}` | {_type(key.type)} | {_default(key)} | {_description(key.type)} |")
        named, inner = _struct(key.type)
        if inner is not None:
            inside.setdefault(inner, []).append(f"`[{path}.{key.encode_name}{named}]`")
    made = IN_PYTHON.get(kind, "")
    if not made:
        if kind.__module__ != Config.__module__ and getattr(handrail.guards, kind.__name__) is not kind:
            raise LookupError(f"handrail.guards.{kind.__name__} is another class")
        made = "" if kind.__module__ == Config.__module__ else f" In Python: `handrail.guards.{kind.__name__}`."
    prose = " ".join(filter(None, [told, _prose(kind)])) + made
    prose = textwrap.fill(prose, 120, break_long_words=False, break_on_hyphens=False)
    yield "\n\n".join([heading, prose, "\n".join(rows)]) + "\n"
    for inner, paths in inside.items():
        yield from _table(f"### {', '.join(paths)}", inner)


def _prose(kind: type[Struct]) -> str:
    paragraphs = (kind.__doc__ or "").split("\n\n")
    return " ".join(" ".join(each.split()) for each in paragraphs if ">>>" not in each)


def _struct(kind: Any) -> tuple[str, type[Struct] | None]:
    """The section a key opens, with what stands for its names if there may be several."""
    kind = _plain(kind)
    if get_origin(kind) is dict:
        return ".NAME", _struct(get_args(kind)[1])[1]
    return "", kind if isinstance(kind, type) and issubclass(kind, Struct) else None


def _plain(kind: Any) -> Any:
    """A type without what is said of it, and without being absent."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        left = [each for each in get_args(kind) if each not in (NoneType, UnsetType)]
        return _plain(left[0]) if len(left) == 1 else kind
    return kind


def _type(kind: Any) -> str:
    kind = _plain(kind)
    inner = get_args(kind)
    match get_origin(kind):
        case None:
            return "table" if isinstance(kind, type) and issubclass(kind, Struct) else WORDS[kind]
        case origin if origin is Literal:
            return ", ".join(f"`{_toml(each)}`" for each in inner)
        case origin if origin is list:
            return f"list of {_type(inner[0])}"
        case origin if origin is dict:
            return "table" if inner[1] is Any else f"{_type(inner[1])}, by name"
        case origin if origin is tuple:
            return f"list of {len(inner)} {_type(inner[0])}s"
        case _ if any(get_origin(each) for each in inner) and str not in inner:
            return " or ".join(map(_type, inner))
        case _:
            return "text or list of texts" if str in inner else "number"  # whole or not


def _description(kind: Any) -> str:
    for each in getattr(kind, "__metadata__", ()):
        if isinstance(each, Meta) and each.description:
            return each.description.replace("|", "\\|")
    return next(filter(None, map(_description, get_args(kind))), "") if get_origin(kind) is not Literal else ""


def _default(key: FieldInfo) -> str:
    if key.required:
        return "required"
    value = key.default if key.default is not NODEFAULT else key.default_factory()
    return "" if value in (None, UNSET) or isinstance(value, Struct) else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    value = int(value) if type(value) is float and value.is_integer() else value
    return encode(value).decode()


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(page(), end="")
    else:
        PAGE.write_text(page(), "utf-8")
