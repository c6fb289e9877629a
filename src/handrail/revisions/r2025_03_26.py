"""2025-03-26: tool annotations, audio, progress messages and batches in."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET
from msgspec.structs import replace

from handrail.model import Object, Tool
from handrail.revisions import downlevel as levels, r2024_11_05
from handrail.revisions.r2024_11_05 import BLOCKS

_BLOCKS = replace(BLOCKS, types=frozenset({"text", "image", "audio", "resource"}))


def tool(definition: Tool) -> Object:
    out = levels.tool(definition, members=("name", "description", "inputSchema", "annotations"))
    if definition.title is not UNSET:
        out.setdefault("annotations", {}).setdefault("title", definition.title)
    return out


REVISION = replace(
    r2024_11_05.REVISION,
    name="2025-03-26",
    batches=True,
    http_default=True,
    progress_message=True,
    server_capabilities=r2024_11_05.REVISION.server_capabilities | {"completions"},
    tool=tool,
    losses=partial(levels.losses, _BLOCKS, "none"),
    encoders={
        **r2024_11_05.REVISION.encoders,
        "tools/call": partial(r2024_11_05.result, _BLOCKS),
        "prompts/get": partial(levels.prompt_result, _BLOCKS),
    },
)
