"""What is written down of a call. Arguments are in it as a digest, and masked if that was asked for; results never."""

from __future__ import annotations

from secrets import token_hex

from handrail.engine.call import Call
from handrail.errors import Refused
from handrail.guards.chain import weighed
from handrail.guards.inert import mask_secrets
from handrail.guards.secrets import Secrets
from handrail.jsonrpc import Request
from handrail.model import Object
from handrail.protocol.http import Headers
from handrail.protocol.trace import read as read_trace, read_headers


def intent(call: Call, secrets: Secrets | None) -> Object:
    """With the arguments, if it is known what to mask in them."""
    record = about(call, "intent")
    if secrets is not None:
        record["arguments"] = mask_secrets(secrets.hidden_in(call.arguments))
    if call.approval is not None and call.approval.edited is not None:
        record["asked_digest"] = weighed(call.approval.asked.arguments)["arguments_digest"]
    if call.repairs:
        record["repaired"] = [each.path for each in call.repairs]
    return record


def turned_away(request: Request, where: Object, headers: Headers | None, refused: Refused) -> Object:
    """Of a call that was turned away before it was one: what it says of itself may be anything."""
    name, arguments, meta = (request.params.get(each) for each in ("name", "arguments", "_meta"))
    named = read_trace(meta.get("traceparent")) if type(meta) is dict else None
    trace = named or read_headers(headers)
    return {
        "event": "refusal",
        "call": token_hex(8),
        **where,
        "tool": name[:200] if type(name) is str else "",
        **weighed({} if arguments is None else arguments),
        **({} if trace is None else {"trace": trace.trace_id}),
        "outcome": refused.kind.value,
    }


def about(call: Call, event: str) -> Object:
    record: Object = {
        "event": event,
        "call": call.serial,
        "principal": call.principal.id,
        "from": call.address,
        "server": call.server,
        "client": call.client.name[:100],
        "revision": call.revision.name,
        "tool": call.name,
        "fingerprint": call.entry.fingerprint,
        **weighed(call.arguments),
    }
    if call.decision is not None:
        record["rule"] = call.decision.rule
    if call.agreed:
        record["agreed"] = call.agreed
    if call.trace is not None:
        record["trace"] = call.trace.trace_id
    return record
