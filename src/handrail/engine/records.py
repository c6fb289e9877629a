"""What is written down of a call. Arguments are in it as a digest, and masked if that was asked for; results never."""

from __future__ import annotations

from hashlib import sha256
from secrets import token_hex

from msgspec.json import Encoder

from handrail.engine.call import Call
from handrail.errors import Refused
from handrail.guards.inert import mask_secrets
from handrail.jsonrpc import Request
from handrail.model import Object

_canonical = Encoder(order="sorted").encode


def intent(call: Call, secrets: frozenset[str] | None) -> Object:
    """With the arguments, if it is known what to mask in them."""
    record = about(call, "intent")
    record["fingerprint"] = call.entry.fingerprint
    if secrets is not None:
        record["arguments"] = mask_secrets(call.arguments, secrets)
    if call.decision is not None:
        record["rule"] = call.decision.rule
    if call.agreed:
        record["agreed"] = call.agreed
    if call.approval is not None and call.approval.edited is not None:
        record["asked_digest"] = _digest(call.approval.asked.arguments)
    if call.repairs:
        record["repaired"] = [each.path for each in call.repairs]
    return record


def turned_away(request: Request, where: Object, refused: Refused) -> Object:
    """Of a call that was turned away before it was one."""
    name, arguments = request.params.get("name"), request.params.get("arguments")
    return {
        "event": "refusal",
        "call": token_hex(8),
        **where,
        "tool": name[:200] if type(name) is str else "",
        "arguments_digest": _digest(arguments if type(arguments) is dict else {}),
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
        "arguments_digest": _digest(call.arguments),
    }
    if call.trace is not None:
        record["trace"] = call.trace.trace_id
    return record


def _digest(arguments: Object) -> str:
    return "sha256:" + sha256(_canonical(arguments)).hexdigest()
