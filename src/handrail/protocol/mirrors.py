"""Headers that repeat what a request says in its body, for those on the way who do not read bodies."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from handrail.model import Json
from handrail.protocol.http import NAMED

# No blanks at the edges: they are lost on the way.
_PLAIN = re.compile(r"(?:[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)?")
_SENTINEL = "=?base64?"


def mirror(text: str) -> str:
    """A text as the value of a header: as it is if that comes through whole, else as base64."""
    if _PLAIN.fullmatch(text) and not text.lower().startswith(_SENTINEL):
        return text
    return f"{_SENTINEL}{b64encode(text.encode()).decode()}?="


def mirrors(method: str, params: Mapping[str, Any], header_map: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """The headers of a stateless request; `header_map` has the path of an argument for each `Mcp-Param-…` of a tool."""
    out = {"Mcp-Method": mirror(method)}
    name = params.get(NAMED.get(method, ""))
    if type(name) is str:
        out["Mcp-Name"] = mirror(name)
    for suffix, path in header_map.items():
        value: Json = params.get("arguments")
        for member in path:
            value = value.get(member) if isinstance(value, Mapping) else None
        if (told := _told(value)) is not None:
            out[f"Mcp-Param-{suffix}"] = told
    return out


def _told(value: Json) -> str | None:
    """An argument as a header says it; nothing for what no header can be about."""
    if isinstance(value, str):
        return mirror(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else None
