"""2025-11-25: icons, URL elicitation, richer forms; invalid arguments become results the model can read."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from handrail.errors import Kind
from handrail.revisions import base, downlevel as levels, r2025_06_18

REVISION = replace(
    r2025_06_18.REVISION,
    name="2025-11-25",
    primes=True,
    null_id=False,
    welcome=partial(base.welcome, info=base.Identity.__struct_encode_fields__),
    tool=partial(levels.tool, members=(*r2025_06_18.TOOL, "icons")),
    result=partial(r2025_06_18.result, None),
    declare=lambda capabilities: capabilities,
    faults={**r2025_06_18.REVISION.faults, Kind.BAD_ARGUMENTS: base.Fault(0)},
    ask=lambda method, params: params,
    heard=lambda params, answer: answer,
)
