"""The client library: one client for any server of any revision.

The names below are public; `Client` and `Clocks` are also names of the package itself. They are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from handrail.client.blocking import BlockingClient
    from handrail.client.client import Client
    from handrail.client.consent import Confirmation, allow
    from handrail.client.inflight import Clocks, Log, Progress
    from handrail.client.input_handlers import Elicitation, Sampling
    from handrail.client.mcp_config import ServerEntry
    from handrail.client.results import CallResult
    from handrail.client.tools import ListedTool, Tools
    from handrail.oauth.client import OAuth, open_browser

__all__ = [
    "BlockingClient",
    "CallResult",
    "Client",
    "Clocks",
    "Confirmation",
    "Elicitation",
    "ListedTool",
    "ServerEntry",
]
__all__ += ["Log", "OAuth", "Progress", "Sampling", "Tools", "allow", "open_browser"]

_HOMES = tuple(
    f"client.{each}" for each in "mcp_config inflight consent input_handlers results client blocking".split()
)
_HOMES += ("oauth.client",)


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        module = import_module(f"handrail.{home}")
        if hasattr(module, name):
            value = globals()[name] = getattr(module, name)
            return value
    raise AttributeError(f"module 'handrail.client' has no attribute {name!r}")
