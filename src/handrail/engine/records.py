"""What is written down of a call. Arguments are in it as a digest, and masked if that was asked for; results never."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import UNSET, Struct, UnsetType, defstruct, field
from msgspec.structs import replace

from handrail.audit.format import AuditEvent, digest
from handrail.engine.call import STAGES, Call
from handrail.errors import Refused
from handrail.jsonrpc import Request, encode_sorted
from handrail.model import Json
from handrail.protocol.http_rules import Headers
from handrail.protocol.trace import read as read_trace, read_headers
from handrail.text.controls import mask_secrets
from handrail.text.secrets import Secrets

Stages = defstruct("Stages", [(name, int, 0) for name in STAGES], omit_defaults=True)
"""How long each took."""


class CallRecord(AuditEvent, omit_defaults=True):
    """One of the records of a call; what does not apply is not in it."""

    # The event is `intent_record` or `outcome`; or of a call that was not begun `refusal`, `answered` or `asked`.
    call: str  # the same in all records of one call
    outcome: str = ""
    principal: str = ""
    address: str = field(default="", name="from")
    server: str = ""
    client: str = ""
    revision: str = ""
    tool: str = ""
    fingerprint: str = ""
    arguments_digest: str = ""
    arguments_bytes: int = 0
    rule: str = ""
    agreed: str = ""
    trace: str = ""
    arguments: Json = UNSET
    asked_digest: str = ""  # of the arguments that were shown to a person, who changed them
    repaired: Sequence[str] = ()
    seconds: float | UnsetType = UNSET
    stages_ns: Struct | UnsetType = UNSET
    characters: int | UnsetType = UNSET
    findings: Sequence[str] = ()
    sanitized: Mapping[str, int] = {}  # how often what was changed in what the call returned and told, by class


def intent_record(call: Call, secrets: Secrets | None) -> CallRecord:
    """With the arguments, if it is known what to mask in them."""
    record = call_record(call, "intent")
    if secrets is not None:
        record.arguments = mask_secrets(secrets.redact(call.arguments))
    if call.reviewed_arguments is not None:
        record.asked_digest = digest(encode_sorted(call.reviewed_arguments))
    if call.repairs:
        record.repaired = [each.path for each in call.repairs]
    return record


def refusal_record(request: Request, template: CallRecord, headers: Headers | None, refused: Refused) -> CallRecord:
    """Of a call that was turned away before it was one: what it says of itself may be anything."""
    name, arguments, meta = (request.params.get(each) for each in ("name", "arguments", "_meta"))
    meta_trace = read_trace(meta.get("traceparent")) if type(meta) is dict else None
    trace = meta_trace or read_headers(headers)
    encoded = encode_sorted({} if arguments is None else arguments)
    return replace(
        template,
        tool=name[:200] if type(name) is str else "",
        arguments_digest=digest(encoded),
        arguments_bytes=len(encoded),
        trace="" if trace is None else trace.trace_id,
        outcome=refused.kind.value,
    )


def call_record(call: Call, event: str, outcome: str = "") -> CallRecord:
    entry, decision, trace = call.entry, call.decision, call.trace
    encoded = encode_sorted(call.arguments)
    return CallRecord(
        event,
        call.serial,
        outcome,
        call.principal.id,
        call.address,
        call.server,
        call.client.name[:100],
        call.revision.name,
        entry.tool.name,
        entry.fingerprint,
        digest(encoded),
        len(encoded),
        "" if decision is None else decision.rule,
        call.agreed,
        "" if trace is None else trace.trace_id,
    )
