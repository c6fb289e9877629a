"""MCP tools you can hold on to.

The names below are the public surface; everything else may change. They are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.engine.ask import Answer as Answer, Form as Form, Roots as Roots, Sample as Sample, Url as Url
    from handrail.engine.call import Call as Call
    from handrail.engine.core import Limits as Limits
    from handrail.errors import (
        HandrailError as HandrailError,
        Kind as Kind,
        Refused as Refused,
        RemoteProtocolError as RemoteProtocolError,
        SchemaError as SchemaError,
        ToolError as ToolError,
    )
    from handrail.model import (
        Audio as Audio,
        ClientInfo as ClientInfo,
        EmbeddedResource as EmbeddedResource,
        Image as Image,
        Principal as Principal,
        ResourceLink as ResourceLink,
        Text as Text,
        Tool as Tool,
        ToolResult as ToolResult,
    )
    from handrail.server import Server as Server

__version__ = "0.1.0"

_HOMES = {
    "engine.ask": ("Answer", "Form", "Roots", "Sample", "Url"),
    "engine.call": ("Call",),
    "engine.core": ("Limits",),
    "errors": ("HandrailError", "Kind", "Refused", "RemoteProtocolError", "SchemaError", "ToolError"),
    "model": (
        *("Audio", "ClientInfo", "EmbeddedResource", "Image", "Principal"),
        *("ResourceLink", "Text", "Tool", "ToolResult"),
    ),
    "server": ("Server",),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"handrail.{home}"), name)
            return value
    raise AttributeError(f"module 'handrail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
