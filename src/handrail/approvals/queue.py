"""Calls that wait for a person: filed, shown, decided once, used once (P-19).

An approval is bound to who calls, the tool, its fingerprint and the file it is in, the arguments, the policy in force
and who may decide, by one digest over all of them, and to a time. Who may decide is kept with the question and checked
where it is decided, whatever the settings of the process that decides. Arguments are kept with their secrets masked:
the caller brings them again. It goes `pending → approved → consumed`, or ends as `denied`, `expired` or `cancelled`.
Every step is a compare-and-set on the store, made in one transaction with the record of it where the trail is in the
same database; whoever comes second is told so. The step to `consumed` is handed to whoever writes the intent of the
call, for the same reason: a call runs at most once for one approval, and never without a record.

What a person wants remembered becomes a `Grant`: this caller, this tool as it is now, these arguments, under the rules
in force, until then.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct, ValidationError
from msgspec.json import decode
from msgspec.structs import replace

from handrail.approvals.differences import differences
from handrail.approvals.edits import edit_problems
from handrail.approvals.grants import LEEWAY, Grant, meets, sealed
from handrail.approvals.webhook import Webhook
from handrail.errors import HandrailError
from handrail.guards.limits import ANONYMOUS
from handrail.jsonrpc import encode_sorted
from handrail.model import Object
from handrail.options import seconds
from handrail.schema.compile import compile_schema
from handrail.schema.jsonable import plain
from handrail.stores import Delete, Put, Store, StoreError
from handrail.text.controls import mask_secrets

if TYPE_CHECKING:
    from handrail.audit.log import Trail

__all__ = ["Approval", "ApprovalError", "Approvals", "Asked", "Desk", "Grant"]

Role = Literal["caller", "operator"]
State = Literal["pending", "approved", "denied", "expired", "cancelled", "consumed"]
OPEN: frozenset[State] = frozenset({"pending", "approved"})

KEPT = 24 * 3600.0  # how long what is over can still be looked up
LAST = 30 * KEPT  # and what was last allowed
RETURN_SECONDS = 5.0  # within which a client comes back that was told to
MAX_OPEN = 1000  # questions of one server
MAX_OPEN_EACH = 100  # of one caller of it
FEW_OPEN = 5  # that each caller has room for, also where others have filled the server's
LATELY = 5  # calls that were allowed, by which a new one is judged
MAX_RECENT = 200  # that can be looked back at
MAX_ARGUMENTS = 100_000  # bytes of them as JSON: nobody reads more before saying yes


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
        """Return who may decide, as `by` names them: where callers have names, not the caller, unless that was said."""
        return self.by if self.by != "auto" else "another" if is_identified else "anyone"


class Asked(Struct, frozen=True):
    """A call, as far as its approval is concerned."""

    server: str
    principal: str
    tool: str
    fingerprint: str
    arguments: Object
    policy: str  # its version: other rules need another yes
    rule: str = ""
    why: str = ""
    client: str = ""
    schema: Object = {}  # what other arguments would have to meet; not bound, the fingerprint is
    title: str = ""  # of the tool, as its description
    description: str = ""
    by: str = ""  # who may decide, as in `Approvals`; empty: asked by a version that did not say
    remember: float = 0.0  # seconds the longest remembered yes may live
    source: str = ""  # the file it is served from, and the one of the tool
    hidden: dict[str, str] = {}  # arguments that are kept masked: a digest of each

    def digest(self, arguments: Object | None = None) -> str:
        bound = [self.server, self.principal, self.tool, self.fingerprint, self.policy, self.by, self.source]
        return sha256(encode_sorted([*bound, self.arguments if arguments is None else arguments])).hexdigest()


class Approval(Struct, frozen=True, kw_only=True):
    """One question to a person, and what became of it."""

    id: str
    asked: Asked
    digest: str
    created: float
    expires: float
    state: State = "pending"
    by: str = ""  # who decided
    at: float = 0.0
    note: str = ""
    edited: Object | None = None  # the arguments to run with instead
    ticket: str = ""  # names the one continuation it is good for, once the tool has asked something itself
    preview: str = ""  # what the call would do, in the words of the tool's author
    before: list[str] = []  # how it differs from what the same caller was last allowed to do with the tool


def _room(server: str, principal: str | None = None) -> str:
    """What the keys of open questions begin with: of a server, or of one of its callers."""
    names = [server] if principal is None else [server, principal]
    return "approval-open:" + "".join(f"{sha256(each.encode()).hexdigest()[:16]}:" for each in names)


def _last(asked: Asked) -> str:
    return f"approved-last:{sha256(encode_sorted([asked.server, asked.principal, asked.tool])).hexdigest()}"


class ApprovalError(HandrailError):
    """It cannot be decided: unknown, expired, or decided before."""


class Desk:
    """Where calls wait, and where they are decided; any number of processes may share its store."""

    def __init__(
        self,
        store: Store,
        options: Approvals | None = None,
        *,
        trail: Trail | None = None,
        clock: Callable[[], float] = time.time,
        shared: bool = True,
        hide: Callable[[Object], Object] = mask_secrets,
    ) -> None:
        self.options = options or Approvals()
        self.shared = shared  # somebody outside of this process can see it, and decide
        self._store = store
        self._trail = trail
        self._clock = clock
        self._hide = hide  # the secrets of arguments that are kept
        self.filed: Callable[[Approval], None] | None = None  # is told of each question that is new, and our own

    async def claim(self, asked: Asked, preview: Callable[[], Awaitable[str]] | None = None) -> Approval:
        """The question that is open for this very call, or decided and not used; else a new one.

        `preview` says what the call would do; it is run only for a question that is new.
        """
        digest = asked.digest()
        for _ in range(10):
            index, known = await self._current(digest)
            made = known or await self._file(asked, digest, index, preview)
            if made is not None:
                return made
        raise ApprovalError("too many identical calls wait for the same approval at once")

    async def _current(self, digest: str) -> tuple[bytes | None, Approval | None]:
        """What was last filed for this very call: its name as it is kept, and the approval itself if that holds."""
        index = await self._store.get(f"approval-for:{digest}")
        known = await self.get(index.decode()) if index is not None else None
        if known is None or not self.is_good(known):
            return index, None
        denied = known.state == "denied" and known.by != known.asked.principal  # one's own no binds nobody later
        mine = known.state in OPEN and not known.ticket  # with one it belongs to a call that goes on
        return index, known if mine or denied else None

    def is_good(self, known: Approval) -> bool:
        """Whether it is its time: not over yet, nor, by a clock that was set back, before it was asked (P-21)."""
        return known.created - LEEWAY <= self.now() < known.expires

    async def is_approved(self, asked: Asked) -> bool:
        """Whether there is a yes for this very call that was not used yet."""
        _, known = await self._current(asked.digest())
        return known is not None and known.state == "approved"

    async def _file(
        self, asked: Asked, digest: str, index: bytes | None, preview: Callable[[], Awaitable[str]] | None
    ) -> Approval | None:
        if (size := len(encode_sorted(asked.arguments))) > MAX_ARGUMENTS:
            raise ApprovalError(f"its arguments are {size:,} bytes long, and nobody reads more than {MAX_ARGUMENTS:,}")
        room = _room(asked.server, asked.principal)
        theirs = len(await self._store.scan(room, limit=MAX_OPEN_EACH))
        ours = len(await self._store.scan(_room(asked.server), limit=2 * MAX_OPEN))
        # Callers with few questions have room of their own: those with many leave it to them.
        if theirs >= MAX_OPEN_EACH or ours >= (MAX_OPEN if theirs >= FEW_OPEN else 2 * MAX_OPEN):
            text = "too many calls wait for an approval, or were cancelled while they did"
            raise ApprovalError(f"{text}; wait until some are decided, or their time is over")
        shown = "" if preview is None else await preview()
        now, kept_asked = self.now(), self._masked(asked)
        lately = await self.lately(asked)
        made = Approval(
            id=secrets.token_hex(5),
            asked=kept_asked,
            digest=digest,
            created=now,
            expires=now + self.options.expires,
            preview=shown,
            before=differences(lately, kept_asked) if lately else [],
        )
        good, kept = self.options.expires, self.options.expires + KEPT
        changes = [
            Put(f"approval:{made.id}", encode_sorted(made), kept, if_absent=True),
            Put(f"{room}{made.id}", asked.principal.encode(), good),
            Put(f"approval-caller:{made.id}:", b"", RETURN_SECONDS),  # whose call is about to wait for it
            Put(f"approval-for:{digest}", made.id.encode(), good, if_absent=index is None, if_equals=index),
        ]
        if not await self._commit(made, "asked", *changes):
            return None
        await self._store.append("approvals", made.id.encode(), keep=MAX_RECENT, ttl=kept)
        await self.tell(made)
        if self.filed is not None:
            self.filed(replace(made, asked=asked))
        return made

    def _masked(self, asked: Asked) -> Asked:
        """A call as it is kept: without the secrets in its arguments."""
        shown = self._hide(asked.arguments)
        if len(shown) != len(asked.arguments):  # two names with a secret in them became one
            return replace(asked, arguments=shown, hidden=dict.fromkeys(shown, ""))
        pairs = zip(asked.arguments.items(), shown.items(), strict=True)
        hidden = {new[0]: sealed(asked, *old) for old, new in pairs if encode_sorted(old) != encode_sorted(new)}
        return replace(asked, arguments=shown, hidden=hidden)

    async def decide(
        self,
        ident: str,
        yes: bool,
        *,
        by: str,
        who: str = "",
        role: Role = "operator",
        note: str = "",
        edited: Object | None = None,
        remember: float = 0.0,
        matching: Mapping[str, Object] | None = None,
    ) -> Approval:
        """Say yes or no, once. `remember`: for how many seconds the same call need not be asked about again.

        `who` is the principal that decides, where `by` is not its name; `role` is as what it does.
        `matching`: arguments that need not be the same then, but meet a condition: `{"amount": {"under": 100}}`.
        """
        known = await self._read(ident)
        if known is None:
            raise ApprovalError(f"{ident}: there is no such approval")
        raw, approval = known
        now = self.now()
        if approval.state == "pending" and now >= approval.expires:
            await self._step(raw, replace(approval, state="expired", at=now), "expired")
            raise ApprovalError(f"{ident}: nobody decided in time; it has expired")
        if approval.state != "pending":
            who_was = f" by {approval.by}" if approval.by else ""
            raise ApprovalError(f"{ident}: has been {approval.state}{who_was} already")
        if why := self.why_not(approval, who or by, role):
            raise ApprovalError(f"{ident}: {why}")
        if not yes:
            edited = matching = None  # a no is a no, whatever else was said with it
            remember = 0.0
        asked = approval.asked
        if remember > 0 and not asked.remember:
            raise ApprovalError(f"{ident}: nothing is decided: this server remembers no yes (approvals.remember = 0)")
        for name in (each for each in matching or {} if each in asked.hidden):
            raise ApprovalError(f"remember: {name}: its value is masked: no condition can be kept for it")
        try:
            edited, given = self._as_shown(plain(edited), asked), asked.arguments
            unmet = [name for name, condition in (matching or {}).items() if not meets(name, condition, given)]
        except ValueError as problem:
            raise ApprovalError(f"{ident}: {problem}") from None
        if unmet:
            raise ApprovalError(f"remember: {unmet[0]}: this very call does not meet that condition")
        if edited is not None:
            checker = compile_schema(asked.schema, asked.tool) if asked.schema else None
            if problems := edit_problems(given, {*asked.hidden}, edited, checker):
                raise ApprovalError(f"{ident}: nothing is decided: {'; '.join(text for _, text in problems)}")
        state: State = "approved" if yes else "denied"
        decided = replace(approval, state=state, by=by, at=now, note=note[:1000], edited=edited)
        last = [Put(_last(asked), encode_sorted(await self._allowed(asked, edited)), LAST)] if yes else []
        if not await self._step(raw, decided, state, *last):
            raise ApprovalError(f"{ident}: has just been decided by somebody else")
        if yes and remember > 0 and edited is None:
            await self._remember(decided, min(remember, asked.remember), dict(matching or {}), role)
        return decided

    def _as_shown(self, edited: Object | None, asked: Asked) -> Object | None:
        """Edited arguments, masked where they repeat what is kept masked; a webhook was sent the secrets."""
        if not asked.hidden or type(edited) is not dict:
            return edited
        same = {
            name for name in edited.keys() & asked.hidden if sealed(asked, name, edited[name]) == asked.hidden[name]
        }
        return {name: asked.arguments[name] if name in same else value for name, value in edited.items()}

    async def _allowed(self, asked: Asked, edited: Object | None) -> list[Asked]:
        """What is known of the last calls that were allowed, with this one first."""
        given = asked.arguments if edited is None else edited
        hidden = {name: seal for name, seal in asked.hidden.items() if given.get(name) == asked.arguments[name]}
        made = replace(asked, arguments=self._hide(given), hidden=hidden, schema={}, description="")
        return [made, *await self.lately(asked)][:LATELY]

    async def wait(self, approval: Approval, seconds: float) -> Approval:
        """What has become of it, as soon as that is no longer `pending`, or after `seconds`."""
        async with self._store.subscribe(f"approval:{approval.id}") as news:
            found = await self.get(approval.id)
            if found is None or found.state != "pending":
                return found or replace(approval, state="expired")
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await anext(news)
        return await self.get(approval.id) or replace(approval, state="expired")

    @asynccontextmanager
    async def attending(self, approval: Approval, seconds: float, *, returns: bool = False) -> AsyncIterator[None]:
        """Note for others that the caller waits, for `seconds` at most; if it `returns`, also a while afterwards."""
        filed = f"approval-caller:{approval.id}:"
        key = filed + secrets.token_hex(4)
        with suppress(StoreError):  # it is only shown
            await self._store.commit([Put(key, b"", seconds + RETURN_SECONDS), Delete(filed)])
        try:
            yield
        finally:
            if not returns:
                with suppress(StoreError):
                    await self._store.delete(key)

    async def is_attended(self, approval: Approval) -> bool:
        """Whether a call waits for it now; else a yes is used when its caller calls again."""
        return bool(await self._store.scan(f"approval-caller:{approval.id}:", limit=1))

    def consuming(self, approval: Approval) -> Put:
        """The step that uses a yes up: for whoever writes the intent, to be made with it or not at all."""
        used = replace(approval, state="consumed")
        return Put(f"approval:{approval.id}", encode_sorted(used), KEPT, if_equals=encode_sorted(approval))

    async def continued(self, approval: Approval) -> str:
        """The tool has asked something: the yes is good once more, for whoever brings this back with the answer."""
        used, ticket = replace(approval, state="consumed"), secrets.token_urlsafe(16)
        # Twice its time, however often it goes on: else whoever never answers has a yes for ever.
        more = replace(approval, state="approved", ticket=ticket, expires=approval.at + 2 * self.options.expires)
        return ticket if await self._step(encode_sorted(used), more, "continued") else ""

    async def cancel(self, approval: Approval) -> None:
        """Nobody wants it any more, or it cannot be used; unless it is not what it was when that was found."""
        known = await self._read(approval.id)
        if known is not None and known[1].state == approval.state in OPEN:
            await self._step(known[0], replace(known[1], state="cancelled", at=self.now()), "cancelled")

    def now(self) -> float:
        return float(self._clock())  # an approval is compared as it is written, and 1 is not 1.0

    def why_not(self, approval: Approval, who: str, role: Role = "operator") -> str:
        """Why this one may not decide, by what the server said when it asked; nothing if it may."""
        by, caller = approval.asked.by, approval.asked.principal
        if not by:
            return "an earlier version asked, and did not say who may decide; it is asked again with the next such call"
        if by == "caller" and role != "caller":
            return "only the person at the calling client may decide (approvals.by = 'caller')"
        if by in ("operator", "another") and role == "caller":
            return f"only an operator may decide (approvals.by = {by!r})"
        # Of callers without a name any may be this one.
        nameless = who == ANONYMOUS and caller.startswith(f"{ANONYMOUS} from ")
        if by == "another" and (who == caller or nameless):
            return "somebody else than its caller has to decide on it (approvals.by = 'another')"
        return ""

    async def get(self, ident: str) -> Approval | None:
        known = await self._read(ident)
        return known[1] if known is not None else None

    async def open(self, server: str | None = None) -> list[Approval]:
        """What waits, oldest first: at one server, or at all that keep their questions here."""
        room = "approval-open:" if server is None else _room(server)
        rows = await self._store.scan(room, limit=(10 if server is None else 2) * MAX_OPEN)
        found = await asyncio.gather(*(self.get(key.rpartition(":")[2]) for key, _ in rows))
        waiting = [each for each in found if each is not None and each.state == "pending"]
        return sorted((each for each in waiting if self.now() < each.expires), key=lambda it: it.created)

    async def recent(self) -> list[Approval]:
        """What waits no longer, newest first; of the last there were."""
        rows = await self._store.read("approvals", limit=MAX_RECENT)
        found = await asyncio.gather(*(self.get(ident.decode()) for _, ident in rows))
        now = self.now()
        over = [each for each in found if each is not None and (each.state != "pending" or each.expires <= now)]
        over = [replace(each, state="expired", at=each.expires) if each.state == "pending" else each for each in over]
        return sorted(over, key=lambda it: it.at, reverse=True)

    async def lately(self, asked: Asked) -> list[Asked]:
        """What the same caller was allowed to do with the same tool, newest first: the last few calls."""
        raw = await self._store.get(_last(asked))
        if raw is None:
            return []
        if raw.startswith(b"{"):  # of a version that kept only one, and its secrets
            return [self._masked(decode(raw, type=Asked))]
        return decode(raw, type=list[Asked])

    # What is remembered

    async def _remember(self, approval: Approval, seconds: float, matching: dict[str, Object], role: Role) -> None:
        asked, now = approval.asked, self.now()
        grant = Grant(
            id=secrets.token_hex(5),
            principal=asked.principal,
            tool=asked.tool,
            server=asked.server,
            fingerprint=asked.fingerprint,
            policy=asked.policy,
            arguments=asked.arguments,
            hidden=asked.hidden,
            source=asked.source,
            role=role,
            allowed_by=asked.by,
            matching=matching,
            approval=approval.id,
            until=now + seconds,
            by=approval.by,
            made=now,
        )
        await self._commit(approval, "remembered", Put(f"grant:{grant.id}", encode_sorted(grant), seconds + LEEWAY))
        await self._tell("approvals", b"")

    async def granted(self, asked: Asked) -> Grant | None:
        now = self.now()
        return next((each for each in await self.grants() if each.covers(asked, now)), None)

    async def grants(self) -> list[Grant]:
        return [decode(raw, type=Grant) for _, raw in await self._store.scan("grant:", limit=10 * MAX_OPEN)]

    async def revoke(self, ident: str, *, by: str) -> bool:
        """Forget a grant, and the yes it came from, if that was not used."""
        raw = await self._store.get(f"grant:{ident}")
        if raw is None:
            return False
        first = await self._read(decode(raw, type=Grant).approval)
        if first is not None and first[1].state == "approved":
            await self._step(first[0], replace(first[1], state="cancelled", by=by, at=self.now()), "cancelled")
        done = await self._write({"step": "revoked", "grant": ident, "by": by}, Delete(f"grant:{ident}"))
        await self._tell("approvals", b"")
        return done

    # Steps

    async def _step(self, before: bytes, after: Approval, step: str, *more: Put) -> bool:
        left = max(after.expires - self.now(), 1.0)
        # Taken back undecided, it counts as open until its time is over: else nothing bounds who asks and takes back.
        over = after.by or after.state != "cancelled"
        put = Put(f"approval:{after.id}", encode_sorted(after), left + KEPT if over else left, if_equals=before)
        # The second is where versions before kept it.
        keys = (f"{_room(after.asked.server, after.asked.principal)}{after.id}", f"approval-open:{after.id}")
        close = [Delete(key) for key in keys] if over else []
        done = await self._commit(after, step, put, *close, *more)
        if done:
            await self._tell(f"approval:{after.id}", after.state.encode())
            await self.tell(after)
        return done

    async def tell(self, approval: Approval) -> None:
        """Whoever looks, that it is not what it was."""
        await self._tell("approvals", approval.id.encode())

    async def _tell(self, topic: str, news: bytes) -> None:
        """What is done is done, whether that can be told or not: who waits for it looks by himself, now and then."""
        with suppress(StoreError):
            await self._store.publish(topic, news)

    async def _commit(self, approval: Approval, step: str, *changes: Put | Delete) -> bool:
        asked = approval.asked
        record: Object = {
            "step": step,
            "approval": approval.id,
            "digest": approval.digest,
            "principal": asked.principal,
            "tool": asked.tool,
            "fingerprint": asked.fingerprint,
            "rule": asked.rule,
            "by": approval.by,
        }
        if step == "asked" and approval.preview:
            record["preview"] = approval.preview
        if approval.edited is not None:
            record["edited_digest"] = asked.digest(approval.edited)
        return await self._write(record, *changes)

    async def _write(self, record: Object, *changes: Put | Delete) -> bool:
        if self._trail is None:
            return await self._store.commit(changes)
        return await self._trail.write({"event": "approval", **record}, changes)

    async def _read(self, ident: str) -> tuple[bytes, Approval] | None:
        raw = await self._store.get(f"approval:{ident}")
        if raw is None:
            return None
        try:
            return raw, decode(raw, type=Approval)
        except ValidationError as problem:
            raise ApprovalError(f"{ident}: what is kept of it cannot be read: {problem}") from None
