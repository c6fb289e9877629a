"""The records that go into an audit log: one form for each kind of event, and the only place that names their members.

The order of the fields is the order of the members in the file. Arguments are recorded as a digest, and masked only on
request; results are never recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.json import encode
from msgspec.structs import asdict

from handrail.audit.format import ChainPosition, Retention, digest
from handrail.jsonrpc import encode_sorted
from handrail.model import Json

__all__ = [
    "ApprovalRecord",
    "AuditRecord",
    "CallRecord",
    "ConsoleRecord",
    "OutgoingCallRecord",
    "RejectionRecord",
    "measure_arguments",
    "notice",
    "replaced",
    "trimmed",
]


def measure_arguments(arguments: Json) -> tuple[str, int]:
    """Return the digest of arguments and their size in bytes."""
    encoded = encode_sorted(arguments)
    return digest(encoded), len(encoded)


class AuditRecord(Struct):
    """One event in an audit log."""

    event: str


def notice(event: str, **members: Json) -> bytes:
    """Return the encoded record of an event of the log itself: `opened`, `gap`, `recovered` or `rotated`."""
    return encode({"event": event, **members})


def trimmed(last: ChainPosition, limits: Retention) -> bytes:
    """Return the encoded record of a deletion: the last record deleted, and the limits."""
    return notice("trimmed", to=last.number, digest=last.hash.decode(), **asdict(limits))


def replaced(last: ChainPosition) -> bytes:
    """Return the encoded record of a file that was deleted or replaced: the last record written to it."""
    return notice("replaced", to=last.number, digest=last.hash.decode())


class CallRecord(AuditRecord, omit_defaults=True):
    """A call at a server. A member that does not apply is left out.

    The event of a call that began is `intent` or `outcome`; of one that did not, `refusal`, `answered` or `asked`.
    """

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
    asked_digest: str = ""  # of the arguments that a person was asked about, and changed
    repaired: Sequence[str] = ()
    seconds: float | UnsetType = UNSET
    stages_ns: Struct | UnsetType = UNSET
    characters: int | UnsetType = UNSET
    findings: Sequence[str] = ()
    sanitized: Mapping[str, int] = {}  # changes in the result and in messages, counted by class


class RejectionRecord(AuditRecord, kw_only=True, omit_defaults=True):
    """An HTTP request that was rejected before its message was read."""

    call: str
    principal: str
    address: str = field(name="from")
    server: str
    tool: str
    outcome: str
    why: str
    left_out: int = 0  # rejections before this one that were not recorded


class OutgoingCallRecord(AuditRecord, kw_only=True):
    """A call of a client, as the client records it."""

    side: str | UnsetType = UNSET
    call: str
    server: str | UnsetType = UNSET
    revision: str | UnsetType = UNSET
    tool: str | UnsetType = UNSET
    fingerprint: str | UnsetType = UNSET
    arguments_digest: str | UnsetType = UNSET
    arguments_bytes: int | UnsetType = UNSET
    rule: str | UnsetType = UNSET
    agreed: str | UnsetType = UNSET
    outcome: str | UnsetType = UNSET
    characters: int | UnsetType = UNSET
    sent: str | UnsetType = UNSET
    seconds: float | UnsetType = UNSET


class ApprovalRecord(AuditRecord, kw_only=True):
    """A step of an approval, or the end of a grant."""

    step: str
    approval: str | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    principal: str | UnsetType = UNSET
    tool: str | UnsetType = UNSET
    fingerprint: str | UnsetType = UNSET
    rule: str | UnsetType = UNSET
    grant: str | UnsetType = UNSET
    by: str
    preview: str | UnsetType = UNSET
    edited_digest: str | UnsetType = UNSET

    @classmethod
    def revocation(cls, grant: str, by: str) -> Self:
        return cls("approval", step="revoked", grant=grant, by=by)


class ConsoleRecord(AuditRecord, kw_only=True):
    """An action of a person at the console."""

    step: str
    by: str
    server: str
    roles: Sequence[str] | UnsetType = UNSET
    call: str | UnsetType = UNSET
    tool: str | UnsetType = UNSET
    fingerprint: str | UnsetType = UNSET
    format: str | UnsetType = UNSET
