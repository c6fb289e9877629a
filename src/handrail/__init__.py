"""MCP tools you can hold on to.

The names below are the public surface; everything else may change. They are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.client.client import Client
    from handrail.client.inflight import Clocks
    from handrail.engine.call import Call
    from handrail.engine.core import Limits
    from handrail.engine.input_requests import Answer, Form, Roots, Sample, Url
    from handrail.errors import HandrailError, Kind, Refused, RemoteProtocolError, SchemaError, ToolError
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
__all__ = ["Answer", "Call", "Client", "ClientInfo", "Clocks", "Form", "Limits", "Principal", "Roots", "Sample"]
__all__ += ["Server", "Url"]
__all__ += ["Audio", "EmbeddedResource", "Image", "ResourceLink", "Text", "Tool", "ToolResult"]
__all__ += ["HandrailError", "Kind", "Refused", "RemoteProtocolError", "SchemaError", "ToolError"]

_HOMES = (
    "errors",
    "model",
    "engine.input_requests",
    "engine.call",
    "engine.core",
    "server",
)  # each loads those before it anyway
_CLIENT = {"Client": ("client.client",), "Clocks": ("client.inflight",)}


def __getattr__(name: str) -> Any:
    for home in _CLIENT.get(name, _HOMES) if name in __all__ else ():
        module = import_module(f"handrail.{home}")
        if hasattr(module, name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"module 'handrail' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
