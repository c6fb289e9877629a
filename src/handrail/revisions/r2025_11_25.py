"""2025-11-25: icons, URL elicitation, richer forms; invalid arguments become results the model can read."""

from __future__ import annotations

from functools import partial

from msgspec import to_builtins
from msgspec.structs import replace

from handrail.errors import Kind
from handrail.revisions import base, downlevel as levels, r2025_06_18

REVISION = replace(
    r2025_06_18.REVISION,
    name="2025-11-25",
    priming_event=True,
    elicitation_modes=True,
    null_id=False,
    encoders={
        **r2025_06_18.REVISION.encoders,
        "initialize": partial(base.initialize_result, info=base.Identity.__struct_encode_fields__),
        "tools/call": partial(r2025_06_18.result, None),
        "prompts/get": partial(levels.prompt_result, None),
    },
    definition=to_builtins,
    losses=partial(levels.losses, levels.BlockRules(), "object"),
    tool=partial(levels.tool, members=(*r2025_06_18.TOOL, "icons")),
    declare=lambda capabilities: capabilities,
    error_mappings={**r2025_06_18.REVISION.error_mappings, Kind.BAD_ARGUMENTS: base.ErrorMapping(0)},
    encode_input=lambda method, params: params,
    decode_input=lambda params, answer: answer,
)
