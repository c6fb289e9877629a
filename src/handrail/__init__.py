"""MCP tools: write a function, serve it in every revision of the protocol, and call the tools of any server.

Public are the names of this package, of `handrail.guards`, `handrail.auth` and `handrail.testing`. Everything else may
change. Names are imported from their modules at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from handrail.client.client import BlockingClient as BlockingClient, Client as Client
    from handrail.client.inflight import Clocks as Clocks, Log as Log, Progress as Progress
    from handrail.client.input_handlers import Elicitation as Elicitation, Sampling as Sampling
    from handrail.client.mcp_config import ServerEntry as ServerEntry
    from handrail.client.prompts import (
        Completion as Completion,
        ListedPrompt as ListedPrompt,
        PromptMessages as PromptMessages,
    )
    from handrail.client.resources import (
        ListedResource as ListedResource,
        ListedTemplate as ListedTemplate,
        ReadResult as ReadResult,
    )
    from handrail.client.results import CallResult as CallResult
    from handrail.client.state_dir import Confirmation as Confirmation, allow as allow
    from handrail.client.tools import ListedTool as ListedTool, Tools as Tools
    from handrail.config import ConfigError as ConfigError, load_config as load_config
    from handrail.console import Console as Console
    from handrail.engine.call import Call as Call
    from handrail.engine.core import Limits as Limits, ServerOptions as ServerOptions
    from handrail.engine.input_requests import (
        Answer as Answer,
        Form as Form,
        Roots as Roots,
        Sample as Sample,
        Url as Url,
    )
    from handrail.errors import (
        AuthorizationError as AuthorizationError,
        CallFailed as CallFailed,
        CallTimeout as CallTimeout,
        ConfirmationRequired as ConfirmationRequired,
        Denied as Denied,
        HandrailError as HandrailError,
        HttpRefused as HttpRefused,
        InvalidResult as InvalidResult,
        Kind as Kind,
        LocalProtocolError as LocalProtocolError,
        PeerError as PeerError,
        Refused as Refused,
        RemoteProtocolError as RemoteProtocolError,
        ResourceNotFound as ResourceNotFound,
        SchemaError as SchemaError,
        Sent as Sent,
        ToolError as ToolError,
        TransportError as TransportError,
        Unrecorded as Unrecorded,
    )
    from handrail.model import (
        Audio as Audio,
        ClientInfo as ClientInfo,
        EmbeddedResource as EmbeddedResource,
        Image as Image,
        Principal as Principal,
        Prompt as Prompt,
        PromptMessage as PromptMessage,
        Resource as Resource,
        ResourceLink as ResourceLink,
        ResourceTemplate as ResourceTemplate,
        Text as Text,
        Tool as Tool,
        ToolResult as ToolResult,
    )
    from handrail.server import (
        Gateway as Gateway,
        PromptOptions as PromptOptions,
        ResourceOptions as ResourceOptions,
        Server as Server,
        ToolOptions as ToolOptions,
    )
    from handrail.stores import Store as Store, StoreError as StoreError
    from handrail.stores.memory import MemoryStore as MemoryStore
    from handrail.stores.sqlite import SqliteStore as SqliteStore
    from handrail.transports.http.options import EndpointOptions as EndpointOptions, HttpOptions as HttpOptions
    from handrail.transports.http1.listen import HttpLimits as HttpLimits
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "client.client": "BlockingClient Client",
            "client.state_dir": "Confirmation allow",
            "client.inflight": "Clocks Log Progress",
            "client.input_handlers": "Elicitation Sampling",
            "client.mcp_config": "ServerEntry",
            "client.prompts": "Completion ListedPrompt PromptMessages",
            "client.resources": "ListedResource ListedTemplate ReadResult",
            "client.results": "CallResult",
            "client.tools": "ListedTool Tools",
            "config": "ConfigError load_config",
            "console": "Console",
            "engine.call": "Call",
            "engine.core": "Limits ServerOptions",
            "engine.input_requests": "Answer Form Roots Sample Url",
            "errors": "AuthorizationError CallFailed CallTimeout ConfirmationRequired Denied HandrailError HttpRefused"
            " InvalidResult Kind LocalProtocolError PeerError Refused RemoteProtocolError ResourceNotFound SchemaError"
            " Sent ToolError TransportError Unrecorded",
            "model": "Audio ClientInfo EmbeddedResource Image Principal Prompt PromptMessage Resource ResourceLink"
            " ResourceTemplate Text Tool ToolResult",
            "server": "Gateway PromptOptions ResourceOptions Server ToolOptions",
            "stores": "Store StoreError",
            "stores.memory": "MemoryStore",
            "stores.sqlite": "SqliteStore",
            "transports.http.options": "EndpointOptions HttpOptions",
            "transports.http1.listen": "HttpLimits",
        },
    )
