"""MCP tools you can hold on to.

The names below are the public surface; everything else may change. They are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.engine.ask import Answer, Form, Roots, Sample, Url
    from handrail.engine.call import Call
    from handrail.engine.core import Limits
    from handrail.errors import HandrailError, Refused, SchemaError, ToolError
    from handrail.model import (
        Audio,
        ClientInfo,
        EmbeddedResource,
        Image,
        Principal,
        ResourceLink,
        Text,
        Tool,
        ToolResult,
    )
    from handrail.server import Server

__version__ = "0.1.0"

_HOMES = {
    "Answer": "engine.ask",
    "Audio": "model",
    "Call": "engine.call",
    "ClientInfo": "model",
    "EmbeddedResource": "model",
    "Form": "engine.ask",
    "HandrailError": "errors",
    "Image": "model",
    "Limits": "engine.core",
    "Principal": "model",
    "Refused": "errors",
    "ResourceLink": "model",
    "Roots": "engine.ask",
    "Sample": "engine.ask",
    "SchemaError": "errors",
    "Server": "server",
    "Text": "model",
    "Tool": "model",
    "ToolError": "errors",
    "ToolResult": "model",
    "Url": "engine.ask",
}

__all__ = [
    "Answer",
    "Audio",
    "Call",
    "ClientInfo",
    "EmbeddedResource",
    "Form",
    "HandrailError",
    "Image",
    "Limits",
    "Principal",
    "Refused",
    "ResourceLink",
    "Roots",
    "Sample",
    "SchemaError",
    "Server",
    "Text",
    "Tool",
    "ToolError",
    "ToolResult",
    "Url",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'handrail' has no attribute {name!r}")
    value = getattr(import_module(f"handrail.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
