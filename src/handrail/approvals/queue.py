"""Calls that wait for the decision of a person: filed, shown, decided once, used once (P-19).

An approval is bound to who calls, the tool, its fingerprint and the file it is in, the arguments, the policy in force
and who may decide, by one digest over all of them, and to a time. Who may decide is stored with the request and checked
by the process that decides, whatever its own settings are. Arguments are stored with their secrets masked:
the caller brings them again. It goes `pending → approved → consumed`, or ends as `denied`, `expired` or `cancelled`.
Every step is a compare-and-set on the store, made in one transaction with the record of it where the trail is in the
same database; the second of two decisions is an error. The step to `consumed` is part of the transaction that writes
the intent of the call, for the same reason: a call runs at most once for one approval, and never without a record.

A decision that is remembered becomes a grant: for this caller, this tool as it is now and these arguments, under the
rules in force, for a limited time.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import UNSET, Meta, Struct, ValidationError
from msgspec.json import decode
from msgspec.structs import replace

from handrail.approvals.request import (
    CLOCK_SKEW_SECONDS,
    Approval,
    ApprovalGrant,
    ApprovalRequest,
    ApprovalState,
    argument_digest,
    describe_differences,
    edit_problems,
    meets_condition,
)
from handrail.approvals.webhook import Webhook
from handrail.audit.format import ApprovalRecord
from handrail.errors import HandrailError
from handrail.guards.limits import ANONYMOUS
from handrail.jsonrpc import encode_sorted
from handrail.model import Object
from handrail.schema.compile import compile_schema
from handrail.schema.jsonable import to_jsonable
from handrail.stores import Delete, Put, Store, StoreError
from handrail.suggest import seconds
from handrail.text.controls import mask_secrets

if TYPE_CHECKING:
    from handrail.audit.log import Trail

__all__ = ["Approval", "ApprovalError", "ApprovalGrant", "ApprovalQueue", "ApprovalRequest", "Approvals"]

DeciderRole = Literal["caller", "operator"]
OPEN_STATES: frozenset[ApprovalState] = frozenset({"pending", "approved"})

CLOSED_TTL_SECONDS = 24 * 3600.0  # how long what is over can still be looked up
HISTORY_TTL_SECONDS = 30 * CLOSED_TTL_SECONDS  # and what was last allowed
RETURN_SECONDS = 5.0  # a client that was asked to retry comes back within this time
MAX_OPEN = 1000  # questions of one server
MAX_OPEN_EACH = 100  # of one caller of it
RESERVED_OPEN_EACH = 5  # that each caller has room for, also where others have filled the server's
MAX_HISTORY = 5  # calls that were allowed, by which a new one is judged
MAX_RECENT = 200  # that can be looked back at
MAX_ARGUMENTS_BYTES = 100_000  # as JSON: a person reads no more before deciding


class Approvals(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is asked about a call that a rule says must be asked about, and for how long."""

    by: Annotated[
        Literal["auto", "anyone", "caller", "operator", "another"],
        Meta(
            description="Who may say yes: the person at the calling client, somebody at this server (an operator), "
            "an operator who is not the caller, or anyone. auto: another over HTTP with identities, else anyone."
        ),
    ] = "auto"
    wait: Annotated[float, Meta(description="Seconds a call is held open; clients often give up after 60.")] = 50.0
    round: Annotated[
        float,
        Meta(description="Seconds a call of a stateless revision is held before its client is told to come back."),
    ] = 20.0
    expires: Annotated[float, Meta(description="Seconds until a question, or an unused yes, is void.")] = 900.0
    remember: Annotated[float, Meta(description="Seconds the longest remembered yes may live; 0: none may.")] = (
        30 * 86400.0
    )
    webhook: Annotated[Webhook, Meta(description="Who else is told of each question, and may decide it.")] = Webhook()

    def __post_init__(self) -> None:
        if self.webhook.url and self.by == "caller":
            raise ValueError("approvals.webhook: has nothing to decide while by = 'caller'")
        for name in ("wait", "round", "expires"):
            if not seconds(f"approvals.{name}", getattr(self, name)) < float("inf"):
                raise ValueError(f"approvals.{name}: {getattr(self, name)!r} is not a number of seconds above 0")

    def deciders(self, is_identified: bool) -> str:
        """Return who may decide, as `by` names them. Where callers have identities, `auto` excludes the caller."""
        return self.by if self.by != "auto" else "another" if is_identified else "anyone"


def _open_prefix(server: str, principal: str | None = None) -> str:
    """What the keys of open questions begin with: of a server, or of one of its callers."""
    names = [server] if principal is None else [server, principal]
    return "approval-open:" + "".join(f"{sha256(each.encode()).hexdigest()[:16]}:" for each in names)


def _history_key(request: ApprovalRequest) -> str:
    return f"approved-last:{sha256(encode_sorted([request.server, request.principal, request.tool])).hexdigest()}"


class ApprovalError(HandrailError):
    """It cannot be decided: unknown, expired, or decided before."""


class ApprovalQueue:
    """Where calls wait, and where they are decided; any number of processes may share its store."""

    def __init__(
        self,
        store: Store,
        options: Approvals | None = None,
        *,
        trail: Trail | None = None,
        clock: Callable[[], float] = time.time,
        shared: bool = True,
        redact: Callable[[Object], Object] = mask_secrets,
    ) -> None:
        self.options = options or Approvals()
        self.shared = shared  # an operator outside of this process can decide
        self._store = store
        self._trail = trail
        self._clock = clock
        self._redact = redact  # removes the secrets from stored arguments
        self.on_created: Callable[[Approval], None] | None = None  # called for each new request of this process

    def enable_operators(self) -> None:
        """Let calls wait for an operator, also where the store is in memory: a console of this process shows them."""
        self.shared = True

    async def find_or_create(
        self, request: ApprovalRequest, preview: Callable[[], Awaitable[str]] | None = None
    ) -> Approval:
        """The question that is open for this very call, or decided and not used; else a new one.

        `preview` says what the call would do; it is run only for a question that is new.
        """
        digest = request.digest()
        for _ in range(10):
            index, reusable = await self._find_reusable(digest)
            approval = reusable or await self._create(request, digest, index, preview)
            if approval is not None:
                return approval
        raise ApprovalError("too many identical calls wait for the same approval at once")

    async def _find_reusable(self, digest: str) -> tuple[bytes | None, Approval | None]:
        """Return what was last filed for the same call: the stored id, and the approval if it is reusable."""
        index = await self._store.get(f"approval-for:{digest}")
        approval = await self.get(index.decode()) if index is not None else None
        if approval is None or not self.is_current(approval):
            return index, None
        is_binding_denial = (
            approval.state == "denied" and approval.by != approval.asked.principal
        )  # a denial by the caller does not bind later calls
        is_reusable = (
            approval.state in OPEN_STATES and not approval.ticket
        )  # with one it belongs to a call that goes on
        return index, approval if is_reusable or is_binding_denial else None

    def is_current(self, approval: Approval) -> bool:
        """Whether it is its time: not over yet, nor, by a clock that was set back, before it was asked (P-21)."""
        return approval.created - CLOCK_SKEW_SECONDS <= self.now() < approval.expires

    async def is_approved(self, request: ApprovalRequest) -> bool:
        """Whether there is a yes for this very call that was not used yet."""
        _, approval = await self._find_reusable(request.digest())
        return approval is not None and approval.state == "approved"

    async def _create(
        self, request: ApprovalRequest, digest: str, index: bytes | None, preview: Callable[[], Awaitable[str]] | None
    ) -> Approval | None:
        if (size := len(encode_sorted(request.arguments))) > MAX_ARGUMENTS_BYTES:
            raise ApprovalError(
                f"its arguments are {size:,} bytes long, and nobody reads more than {MAX_ARGUMENTS_BYTES:,}"
            )
        prefix = _open_prefix(request.server, request.principal)
        caller_count = len(await self._store.scan(prefix, limit=MAX_OPEN_EACH))
        server_count = len(await self._store.scan(_open_prefix(request.server), limit=2 * MAX_OPEN))
        # Callers with few questions have room of their own: those with many leave it to them.
        if caller_count >= MAX_OPEN_EACH or server_count >= (
            MAX_OPEN if caller_count >= RESERVED_OPEN_EACH else 2 * MAX_OPEN
        ):
            text = "too many calls wait for an approval, or were cancelled while they did"
            raise ApprovalError(f"{text}; wait until some are decided, or their time is over")
        preview_text = "" if preview is None else await preview()
        now, masked_request = self.now(), self._mask_request(request)
        history = await self.recently_allowed(request)
        approval = Approval(
            id=secrets.token_hex(5),
            asked=masked_request,
            digest=digest,
            created=now,
            expires=now + self.options.expires,
            preview=preview_text,
            before=describe_differences(history, masked_request) if history else [],
        )
        open_ttl, record_ttl = self.options.expires, self.options.expires + CLOSED_TTL_SECONDS
        changes = [
            Put(f"approval:{approval.id}", encode_sorted(approval), record_ttl, if_absent=True),
            Put(f"{prefix}{approval.id}", request.principal.encode(), open_ttl),
            Put(f"approval-caller:{approval.id}:", b"", RETURN_SECONDS),  # whose call is about to wait for it
            Put(f"approval-for:{digest}", approval.id.encode(), open_ttl, if_absent=index is None, if_equals=index),
        ]
        if not await self._commit(approval, "asked", *changes):
            return None
        await self._store.append("approvals", approval.id.encode(), keep=MAX_RECENT, ttl=record_ttl)
        await self.publish_change(approval)
        if self.on_created is not None:
            self.on_created(replace(approval, asked=request))
        return approval

    def _mask_request(self, request: ApprovalRequest) -> ApprovalRequest:
        """Return a call as it is stored: without the secrets in its arguments."""
        masked = self._redact(request.arguments)
        if len(masked) != len(request.arguments):  # two names with a secret in them became one
            return replace(request, arguments=masked, hidden=dict.fromkeys(masked, ""))
        pairs = zip(request.arguments.items(), masked.items(), strict=True)
        hidden = {
            new[0]: argument_digest(request, *old) for old, new in pairs if encode_sorted(old) != encode_sorted(new)
        }
        return replace(request, arguments=masked, hidden=hidden)

    async def decide(
        self,
        approval_id: str,
        yes: bool,
        *,
        by: str,
        who: str = "",
        role: DeciderRole = "operator",
        note: str = "",
        edited: Object | None = None,
        remember: float = 0.0,
        matching: Mapping[str, Object] | None = None,
    ) -> Approval:
        """Say yes or no, once. `remember`: for how many seconds the same call need not be asked about again.

        `who` is the principal that decides, where `by` is not its name; `role` is as what it does.
        `matching`: arguments that need not be the same then, but meet a condition: `{"amount": {"under": 100}}`.
        """
        row = await self._read(approval_id)
        if row is None:
            raise ApprovalError(f"{approval_id}: there is no such approval")
        raw, approval = row
        now = self.now()
        if approval.state == "pending" and now >= approval.expires:
            await self._transition(raw, replace(approval, state="expired", at=now), "expired")
            raise ApprovalError(f"{approval_id}: nobody decided in time; it has expired")
        if approval.state != "pending":
            decider = f" by {approval.by}" if approval.by else ""
            raise ApprovalError(f"{approval_id}: has been {approval.state}{decider} already")
        if reason := self.refusal_reason(approval, who or by, role):
            raise ApprovalError(f"{approval_id}: {reason}")
        if not yes:
            edited = matching = None  # a denial has no other effect
            remember = 0.0
        request = approval.asked
        if remember > 0 and not request.remember:
            raise ApprovalError(
                f"{approval_id}: nothing is decided: this server remembers no yes (approvals.remember = 0)"
            )
        for name in (each for each in matching or {} if each in request.hidden):
            raise ApprovalError(f"remember: {name}: its value is masked: no condition can be kept for it")
        try:
            edited, arguments = self._restore_masks(to_jsonable(edited), request), request.arguments
            unmet = [
                name for name, condition in (matching or {}).items() if not meets_condition(name, condition, arguments)
            ]
        except ValueError as problem:
            raise ApprovalError(f"{approval_id}: {problem}") from None
        if unmet:
            raise ApprovalError(f"remember: {unmet[0]}: this very call does not meet that condition")
        if edited is not None:
            checker = compile_schema(request.schema, request.tool) if request.schema else None
            if problems := edit_problems(arguments, {*request.hidden}, edited, checker):
                raise ApprovalError(f"{approval_id}: nothing is decided: {'; '.join(text for _, text in problems)}")
        state: ApprovalState = "approved" if yes else "denied"
        decided = replace(approval, state=state, by=by, at=now, note=note[:1000], edited=edited)
        history_ops = (
            [
                Put(
                    _history_key(request),
                    encode_sorted(await self._updated_history(request, edited)),
                    HISTORY_TTL_SECONDS,
                )
            ]
            if yes
            else []
        )
        if not await self._transition(raw, decided, state, *history_ops):
            raise ApprovalError(f"{approval_id}: has just been decided by somebody else")
        if yes and remember > 0 and edited is None:
            await self._create_grant(decided, min(remember, request.remember), dict(matching or {}), role)
        return decided

    def _restore_masks(self, edited: Object | None, request: ApprovalRequest) -> Object | None:
        """Mask edited arguments where they repeat a stored mask; a webhook has received the secrets."""
        if not request.hidden or type(edited) is not dict:
            return edited
        same = {
            name
            for name in edited.keys() & request.hidden
            if argument_digest(request, name, edited[name]) == request.hidden[name]
        }
        return {name: request.arguments[name] if name in same else value for name, value in edited.items()}

    async def _updated_history(self, request: ApprovalRequest, edited: Object | None) -> list[ApprovalRequest]:
        """Return the last calls that were allowed, this one first."""
        arguments = request.arguments if edited is None else edited
        hidden = {name: seal for name, seal in request.hidden.items() if arguments.get(name) == request.arguments[name]}
        allowed = replace(request, arguments=self._redact(arguments), hidden=hidden, schema={}, description="")
        return [allowed, *await self.recently_allowed(request)][:MAX_HISTORY]

    async def wait(self, approval: Approval, seconds: float) -> Approval:
        """What has become of it, as soon as that is no longer `pending`, or after `seconds`."""
        async with self._store.subscribe(f"approval:{approval.id}") as messages:
            current = await self.get(approval.id)
            if current is None or current.state != "pending":
                return current or replace(approval, state="expired")
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await anext(messages)
        return await self.get(approval.id) or replace(approval, state="expired")

    @asynccontextmanager
    async def caller_waiting(self, approval: Approval, seconds: float, *, returns: bool = False) -> AsyncIterator[None]:
        """Note for others that the caller waits, for `seconds` at most; if it `returns`, also a while afterwards."""
        prefix = f"approval-caller:{approval.id}:"
        key = prefix + secrets.token_hex(4)
        with suppress(StoreError):  # only the display depends on it
            await self._store.commit([Put(key, b"", seconds + RETURN_SECONDS), Delete(prefix)])
        try:
            yield
        finally:
            if not returns:
                with suppress(StoreError):
                    await self._store.delete(key)

    async def is_caller_waiting(self, approval: Approval) -> bool:
        """Whether a call waits for it now; else a yes is used when its caller calls again."""
        return bool(await self._store.scan(f"approval-caller:{approval.id}:", limit=1))

    def consume_op(self, approval: Approval) -> Put:
        """Return the change that consumes an approval: to be made in the transaction that writes the intent."""
        consumed = replace(approval, state="consumed")
        return Put(
            f"approval:{approval.id}", encode_sorted(consumed), CLOSED_TTL_SECONDS, if_equals=encode_sorted(approval)
        )

    async def reissue(self, approval: Approval) -> str:
        """Make an approval valid once more, after the tool asked something. Return the ticket that the retry needs."""
        consumed, ticket = replace(approval, state="consumed"), secrets.token_urlsafe(16)
        # At most twice its time, however often: a client that never answers must not have an approval for ever.
        reissued = replace(approval, state="approved", ticket=ticket, expires=approval.at + 2 * self.options.expires)
        return ticket if await self._transition(encode_sorted(consumed), reissued, "continued") else ""

    async def cancel(self, approval: Approval) -> None:
        """Cancel an approval, unless it has changed since it was read."""
        row = await self._read(approval.id)
        if row is not None and row[1].state == approval.state in OPEN_STATES:
            await self._transition(row[0], replace(row[1], state="cancelled", at=self.now()), "cancelled")

    def now(self) -> float:
        return float(self._clock())  # an approval is compared as it is written, and 1 is not 1.0

    def refusal_reason(self, approval: Approval, who: str, role: DeciderRole = "operator") -> str:
        """Return why a person may not decide, by the settings of the request; empty if they may."""
        by, caller = approval.asked.by, approval.asked.principal
        if not by:
            return "an earlier version asked, and did not say who may decide; it is asked again with the next such call"
        if by == "caller" and role != "caller":
            return "only the person at the calling client may decide (approvals.by = 'caller')"
        if by in ("operator", "another") and role == "caller":
            return f"only an operator may decide (approvals.by = {by!r})"
        # Of callers without a name any may be this one.
        is_anonymous = who == ANONYMOUS and caller.startswith(f"{ANONYMOUS} from ")
        if by == "another" and (who == caller or is_anonymous):
            return "somebody else than its caller has to decide on it (approvals.by = 'another')"
        return ""

    async def get(self, approval_id: str) -> Approval | None:
        row = await self._read(approval_id)
        return row[1] if row is not None else None

    async def open(self, server: str | None = None) -> list[Approval]:
        """What waits, oldest first: at one server, or at all that keep their questions here."""
        prefix = "approval-open:" if server is None else _open_prefix(server)
        rows = await self._store.scan(prefix, limit=(10 if server is None else 2) * MAX_OPEN)
        approvals = await asyncio.gather(*(self.get(key.rpartition(":")[2]) for key, _ in rows))
        pending = [each for each in approvals if each is not None and each.state == "pending"]
        return sorted((each for each in pending if self.now() < each.expires), key=lambda approval: approval.created)

    async def recent(self) -> list[Approval]:
        """What waits no longer, newest first; of the last there were."""
        rows = await self._store.read("approvals", limit=MAX_RECENT)
        approvals = await asyncio.gather(*(self.get(approval_id.decode()) for _, approval_id in rows))
        now = self.now()
        closed = [each for each in approvals if each is not None and (each.state != "pending" or each.expires <= now)]
        closed = [
            replace(each, state="expired", at=each.expires) if each.state == "pending" else each for each in closed
        ]
        return sorted(closed, key=lambda approval: approval.at, reverse=True)

    async def recently_allowed(self, request: ApprovalRequest) -> list[ApprovalRequest]:
        """What the same caller was allowed to do with the same tool, newest first: the last few calls."""
        raw = await self._store.get(_history_key(request))
        if raw is None:
            return []
        if raw.startswith(b"{"):  # of a version that stored only one, with its secrets
            return [self._mask_request(decode(raw, type=ApprovalRequest))]
        return decode(raw, type=list[ApprovalRequest])

    # What is remembered

    async def _create_grant(
        self, approval: Approval, seconds: float, matching: dict[str, Object], role: DeciderRole
    ) -> None:
        request, now = approval.asked, self.now()
        grant = ApprovalGrant(
            id=secrets.token_hex(5),
            principal=request.principal,
            tool=request.tool,
            server=request.server,
            fingerprint=request.fingerprint,
            policy=request.policy,
            arguments=request.arguments,
            hidden=request.hidden,
            source=request.source,
            role=role,
            allowed_by=request.by,
            matching=matching,
            approval=approval.id,
            until=now + seconds,
            by=approval.by,
            made=now,
        )
        await self._commit(
            approval, "remembered", Put(f"grant:{grant.id}", encode_sorted(grant), seconds + CLOCK_SKEW_SECONDS)
        )
        await self._publish("approvals", b"")

    async def find_grant(self, request: ApprovalRequest) -> ApprovalGrant | None:
        now = self.now()
        return next((each for each in await self.grants() if each.covers(request, now)), None)

    async def grants(self) -> list[ApprovalGrant]:
        return [decode(raw, type=ApprovalGrant) for _, raw in await self._store.scan("grant:", limit=10 * MAX_OPEN)]

    async def revoke(self, grant_id: str, *, by: str) -> bool:
        """Forget a grant, and the yes it came from, if that was not used."""
        raw = await self._store.get(f"grant:{grant_id}")
        if raw is None:
            return False
        row = await self._read(decode(raw, type=ApprovalGrant).approval)
        if row is not None and row[1].state == "approved":
            await self._transition(row[0], replace(row[1], state="cancelled", by=by, at=self.now()), "cancelled")
        done = await self._write(ApprovalRecord.revocation(grant_id, by), Delete(f"grant:{grant_id}"))
        await self._publish("approvals", b"")
        return done

    # Steps

    async def _transition(self, before: bytes, after: Approval, step: str, *more: Put) -> bool:
        remaining = max(after.expires - self.now(), 1.0)
        # Taken back undecided, it counts as open until its time is over: else nothing bounds who asks and takes back.
        is_final = after.by or after.state != "cancelled"
        put = Put(
            f"approval:{after.id}",
            encode_sorted(after),
            remaining + CLOSED_TTL_SECONDS if is_final else remaining,
            if_equals=before,
        )
        # The second key is that of earlier versions.
        keys = (f"{_open_prefix(after.asked.server, after.asked.principal)}{after.id}", f"approval-open:{after.id}")
        deletes = [Delete(key) for key in keys] if is_final else []
        done = await self._commit(after, step, put, *deletes, *more)
        if done:
            await self._publish(f"approval:{after.id}", after.state.encode())
            await self.publish_change(after)
        return done

    async def publish_change(self, approval: Approval) -> None:
        """Notify the readers of a changed approval."""
        await self._publish("approvals", approval.id.encode())

    async def _publish(self, topic: str, message: bytes) -> None:
        """Publish a message. If the store is down it is lost: those who wait also poll."""
        with suppress(StoreError):
            await self._store.publish(topic, message)

    async def _commit(self, approval: Approval, step: str, *changes: Put | Delete) -> bool:
        request = approval.asked
        record = ApprovalRecord(
            "approval",
            step=step,
            approval=approval.id,
            digest=approval.digest,
            principal=request.principal,
            tool=request.tool,
            fingerprint=request.fingerprint,
            rule=request.rule,
            by=approval.by,
            preview=approval.preview if step == "asked" and approval.preview else UNSET,
            edited_digest=UNSET if approval.edited is None else request.digest(approval.edited),
        )
        return await self._write(record, *changes)

    async def _write(self, record: ApprovalRecord, *changes: Put | Delete) -> bool:
        if self._trail is None:
            return await self._store.commit(changes)
        return await self._trail.write(record, changes)

    async def _read(self, approval_id: str) -> tuple[bytes, Approval] | None:
        raw = await self._store.get(f"approval:{approval_id}")
        if raw is None:
            return None
        try:
            return raw, decode(raw, type=Approval)
        except ValidationError as problem:
            raise ApprovalError(f"{approval_id}: what is kept of it cannot be read: {problem}") from None
