"""What the guards of one server decide about its calls. The pipeline has their order."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypedDict, cast

from msgspec import UNSET, ValidationError, convert, to_builtins
from msgspec.structs import replace

from handrail.approvals.queue import ApprovalQueue, ApprovalRequest, Approvals
from handrail.approvals.request import unmask
from handrail.audit.format import TrailError
from handrail.engine.approval_flow import ApprovalFlow, approval_used_up
from handrail.engine.call_state import CallState
from handrail.engine.catalog import Catalog, ToolEntry, title_of
from handrail.engine.eager import ThreadPool
from handrail.engine.outcome import intent_record
from handrail.engine.preview import run_preview
from handrail.engine.resources import unknown_resource
from handrail.engine.results import TruncatedResults, error_result
from handrail.errors import Kind, Refused
from handrail.guards.limits import (
    ANONYMOUS,
    Admission,
    CallerSlots,
    FindLimit,
    Limiter,
    MemoryLimiter,
    NamedRate,
    Rates,
    Throttled,
    UpstreamRate,
    network,
)
from handrail.guards.policy import Decision, Policy, Rule, SubjectKind, policy_of
from handrail.guards.sanitize import Finding, Inspector, Sanitize, Sanitizer, Scan, changes, is_small, risk, secrets_in
from handrail.jsonrpc import encode
from handrail.model import RISK, SANITIZED, ClientInfo, Json, Object, Principal, Text, ToolResult
from handrail.revisions import Revision
from handrail.schema.repair import repair
from handrail.stores import Store, StoreError, is_url, password_of
from handrail.stores.memory import MemoryStore
from handrail.suggest import collection, describe_value, expect, texts
from handrail.text.controls import escape, mask, mask_secrets, one_line
from handrail.text.log_filter import keep_out_of_logs
from handrail.text.secrets import Secrets

if TYPE_CHECKING:
    from handrail.audit.log import Trail, TrailSettings
    from handrail.guards.limits import SharedLimiter

log = logging.getLogger("handrail")

FILES_READ: set[str] = set()
"""Configuration files that this process has read, by their real paths: what lies beside a server and is not here is not
in force."""


class GuardOptions(TypedDict, total=False):
    """Guards; the defaults are safe.

    policy: a Policy, or a list of Rules: who may call what (destructive tools ask, all others are allowed)
    rates: rate limits; None: no limit (Rates())
    sanitize: what may leave; None: whatever a tool returns (Sanitize())
    inspectors: functions (tool, result) of your own that check each result
    secrets: further values that must not leave (those of the environment)
    approvals: who is asked about a call, and for how long (Approvals())
    repair: read "5" as 5 where only that fits (False)
    audit: a file for the audit log, .db or .jsonl; a postgresql:// URL; or a Trail (no audit log)
    trail: how that file is kept (TrailSettings())
    audit_arguments: log arguments, masked; else a digest of them (False)
    store: where approvals wait, and shared limits are counted: a .db file, the redis:// URL of what replicas share,
        sessions too, or a Store (the audit log's, or memory)
    accept_loss: keep approvals in a store that may lose a write, so that one may count twice (False)
    """

    policy: Policy | Sequence[Rule]
    rates: Rates | None
    sanitize: Sanitize | None
    inspectors: Sequence[Inspector]
    secrets: Iterable[str]
    approvals: Approvals
    repair: bool
    audit: str | Path | Trail | None
    trail: TrailSettings
    audit_arguments: bool
    store: Store | str | Path
    accept_loss: bool


_MEANT: dict[str, tuple[str, *tuple[type, ...]]] = {
    "rates": ('Rates(principal="10/second") of handrail.guards, or None for no limits', Rates),
    "sanitize": ("Sanitize(…) of handrail.guards, or None for none", Sanitize),
    "approvals": ('Approvals(by="operator") of handrail.guards', Approvals),
    "repair": ("True or False", bool),
    "audit_arguments": ("True or False", bool),
}


def check_guard_options(options: GuardOptions, where: str) -> GuardOptions:
    """Return checked guard options; raise TypeError for a wrong value. A list of rules becomes a policy."""
    guards: dict[str, Any] = {**options}
    for name, (meant, *kinds) in _MEANT.items():
        if guards.get(name) is not None:
            expect(f"{where}: {name}", guards[name], meant, *kinds)
    if "policy" in guards:
        guards["policy"] = policy_of(guards["policy"], f"{where}: policy")
    if "secrets" in guards:
        guards["secrets"] = frozenset(texts(f"{where}: secrets", guards["secrets"]))
    if "inspectors" in guards:
        guards["inspectors"] = collection(f"{where}: inspectors", guards["inspectors"], "functions (tool, result)")
        for each in guards["inspectors"]:
            if not callable(each):
                raise TypeError(
                    f"{where}: inspectors: expected functions (tool, result), got {describe_value(each)} among them"
                )
    # A trail, its settings and a store are recognised by a method: their classes would import SQLite.
    for name, verb, meant in (
        ("audit", "submit", 'a file such as "calls.db" or "calls.jsonl", a postgresql:// URL, or a Trail'),
        ("store", "commit", 'a file such as "state.db", a redis:// URL, or a Store'),
        ("trail", "keep_days", "TrailSettings(…) of handrail.guards"),
    ):
        value = guards.get(name)
        if value is not None and not hasattr(value, verb) and (name == "trail" or not isinstance(value, str | Path)):
            raise TypeError(f"{where}: {name}: expected {meant}, got {describe_value(value)}")
    return cast(GuardOptions, guards)


def configured_store(options: GuardOptions) -> Store | None:
    """Return the store of the options, unless it is a file: that is opened when the server starts."""
    store = options.get("store")
    return None if isinstance(store, str | Path) else store


REPAIRED = "io.handrail/repaired"
_CLEANING_THREADS = 2  # threads in which large results are cleaned
_PREVIEW_THREADS = 4  # threads for previews: one that hangs blocks no thread of the tools
MAX_DESCRIPTION = 1_000  # characters of a tool's description in an approval request

_PROMISED = Decision("ask", "built in: destructive tools ask", "the tool is destructive, and the client has not asked")


class GuardSet:
    """The guards of one server, and what they decide. A guard that is not configured is None and is skipped."""

    policy: Policy
    limiter: Limiter | None  # of calls
    request_limiter: MemoryLimiter | None  # of requests that are no calls
    shared_limiter: SharedLimiter | None = None  # of calls and lists, while the server serves with other processes
    store_limiter: SharedLimiter | None = None  # the same, also if nothing is limited yet that it could count
    shares: CallerSlots | None  # of the slots of tools, by caller
    sanitizer: Sanitizer | None
    secrets: frozenset[str]  # values that must not leave
    repairs: bool
    masking: Secrets | None  # of arguments in the audit log
    store: Store  # of approvals
    shared_store: Store | None = None  # of all replicas, for what is hot and may expire; while the server serves
    approval_queue: ApprovalQueue
    audits: bool
    trail: Trail | None = None  # while the server serves
    truncated_results: TruncatedResults | None = None  # while the server serves, if results may be cut

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.clock = clock
        self.options: GuardOptions = {}
        self.served_file = ""  # the file that a command serves the server from
        self.next_serial: Callable[[], str] = lambda: ""  # the id of the next call in the audit log
        self.upstream_limits: dict[str, UpstreamRate] = {}  # of all upstream servers, by their names
        self._entry_limits: dict[str, NamedRate] = {}  # by the name that limits count
        self.find_limit: FindLimit = self._entry_limits.get
        self._cleaning_pool = ThreadPool(_CLEANING_THREADS)
        self._preview_pool = ThreadPool(_PREVIEW_THREADS)

    def configure(self, options: GuardOptions) -> None:
        for name in ("rates", "sanitize", "approvals", "trail"):
            try:  # read the settings as a file is read: a misspelled word is an error
                if (settings := options.get(name)) is not None:
                    convert(to_builtins(settings), type(settings))
            except ValidationError as problem:
                raise ValueError(f"{name}: {problem}") from None
        self.options = options
        self.policy = policy_of(options.get("policy"), "policy") or Policy(clock=self.clock)
        self._has_policy = not self.policy.is_open
        rates = options.get("rates", Rates())
        self.limiter = self.request_limiter = self.shares = None
        if rates is not None:
            self.limiter = self.request_limiter = MemoryLimiter(rates, find=self.find_limit)
            if any(each.share for each in (rates.tool, *rates.tools.values())):
                self.shares = CallerSlots(rates, self.find_limit)
        for name, limits in self.upstream_limits.items():
            self.limit_upstream(name, limits)
        webhook = (options.get("approvals") or Approvals()).webhook
        signing = [webhook.secret()] if webhook.url else []
        passwords = [password_of(str(url)) for name in ("audit", "store") if is_url(url := options.get(name))]
        self.secrets = secrets_in(os.environ) | frozenset(
            [*options.get("secrets", ()), *signing, *filter(None, passwords)]
        )
        sanitize_options = options.get("sanitize", Sanitize())
        patterns = {} if sanitize_options is None else sanitize_options.patterns
        keep_out_of_logs(self.secrets, patterns)
        if sanitize_options is None:
            self.sanitizer = None
        else:
            self.sanitizer = Sanitizer(sanitize_options, secrets=self.secrets, inspectors=options.get("inspectors", ()))
        self.repairs = options.get("repair", False)
        self.audits = options.get("audit") is not None
        self._secret_matcher = Secrets(self.secrets, patterns)
        self.masking = self._secret_matcher if options.get("audit_arguments") else None
        self.use_store(configured_store(options))

    def limit_upstream(self, name: str, limits: UpstreamRate) -> None:
        """Count the calls of an upstream server, also of one that is included while the server serves."""
        rates = self.options.get("rates", Rates())
        if rates is None:
            if limits.all:
                raise ValueError(f"{name}: limits: rates=None counts nothing here; leave it out")
            return
        tools = {f"{name}: limits.tools.{tool}": each for tool, each in limits.tools.items()}
        rates.check_costs({f"{name}: limits": limits, **tools})
        self.upstream_limits[name] = limits
        if self.shares is None and any(each.share for each in limits.all):
            self.shares = CallerSlots(rates, self.find_limit)
        if limits.all and self.store_limiter is not None:
            self.limiter = self.shared_limiter = self.store_limiter

    def limit_entry(self, name: str, limit: NamedRate | None) -> None:
        """Set the limit of what an upstream server offers under this name, or remove it."""
        if limit is not None:
            self._entry_limits[name] = limit
        elif self._entry_limits.pop(name, None) is None:
            return
        for each in (self.request_limiter, self.store_limiter, self.shares):
            if each is not None:
                each.forget(name)

    def use_store(self, store: Store | None, shared: bool = True) -> None:
        """Keep approvals in `store`, or in memory. `shared`: other processes decide there too."""
        options = self.options.get("approvals")
        self.store = MemoryStore(clock=self.clock) if store is None else store
        shared = (shared and store is not None) or bool(options and options.webhook.url)
        self.approval_queue = ApprovalQueue(
            self.store, options, trail=self.trail, clock=self.clock, shared=shared, redact=self.mask_arguments
        )

    def troubles(self) -> dict[str, str]:
        """Return why what the server needs cannot be reached now, by what is affected; nothing while all can be."""
        stores = {"approvals": self.store, "sessions": self.shared_store}
        troubles = {name: getattr(store, "trouble", "") for name, store in stores.items()}
        troubles["signing key"] = getattr(self.trail, "trouble", "")  # a trail of an author's own may have none
        troubles["limits"] = "" if self.shared_limiter is None else self.shared_limiter.trouble
        return {name: trouble for name, trouble in troubles.items() if trouble}

    def mask_arguments(self, arguments: Object) -> Object:
        """Return arguments as they may be stored."""
        return cast(Object, mask_secrets(self._secret_matcher.redact(arguments), self.secrets))

    def must_decide(self, entry: ToolEntry) -> bool:
        """Return whether the policy has to decide about the calls of a tool."""
        return self._has_policy or entry.asks

    def hides(self, entry: ToolEntry, principal: Principal, revision: Revision) -> bool:
        policy = self.policy
        return policy.hides_anything and policy.hides(principal, entry.subject, revision.name) is not None

    def hidden(self, catalog: Catalog[Any], principal: Principal, revision: Revision) -> frozenset[str]:
        """Return the names of the tools that this caller must not see."""
        if not self.policy.hides_anything:
            return frozenset()
        hides = self.policy.hides
        return frozenset(each.name for each in catalog if hides(principal, each.subject, revision.name))

    def check_allowed(self, entry: ToolEntry, arguments: Object, principal: Principal, revision: Revision) -> None:
        """Refuse what a caller may see and may not use."""
        if not entry.scopes <= principal.scopes:
            raise needs_scopes(entry)
        if self._has_policy:
            typed = repair(entry.input, arguments)  # variables come as texts; one that no read would take stays a text
            values = arguments if typed is None else typed[0]
            decision = self.policy.decide(principal, entry.subject, values, revision.name)
            if decision.verdict == "deny":
                raise self._denied(entry, principal, decision, revision)

    def _denied(self, entry: ToolEntry, principal: Principal, decision: Decision, revision: Revision) -> Refused:
        allowed = self.policy.denial_hint(principal, entry.subject, decision, revision.name)
        return Refused(Kind.FORBIDDEN, f"{entry.name} is not allowed {allowed}", readable=True)

    def charge_request(
        self, principal: Principal, address: str, *, is_list: bool = False
    ) -> Awaitable[Admission] | None:
        """Charge a request that is no call. Await the result, if there is one: the limits are in a store."""
        charge: Admission | Awaitable[Admission] = None
        if self.request_limiter is not None:
            charge = self.request_limiter.take(principal.id, "", address)
        if charge is None and is_list and self.shared_limiter is not None:
            charge = self.shared_limiter.take(principal.id, "", address)
        if isinstance(charge, Throttled):
            raise charge.refusal()
        return charge if isinstance(charge, Awaitable) else None

    def start_record(self, call: CallState) -> None:
        """Begin the records of a call in the audit log."""
        if self.trail is None:
            raise Refused(Kind.UNRECORDED, f"{call.name} was not called: the audit log is not open")
        call.trail, call.serial, call.marks = self.trail, self.next_serial(), [perf_counter_ns()]

    def take_share_and_slot(
        self, call: CallState, take: Callable[[], Admission | Awaitable[Admission]]
    ) -> Release | Awaitable[Release]:
        """Charge a call; a caller that has its share of the tool's slots is refused before anything is charged."""
        share = None
        if self.shares is not None:
            share = self.shares.take(call.principal.id, call.entry.limit_name, call.address)
        if isinstance(share, Throttled):
            raise share.refusal()
        try:
            charge = take()
            release = None if charge is None else self.take_charged(call, charge, share)
        except BaseException:
            if share is not None:
                share()
            raise
        if share is None or isinstance(release, Awaitable):
            return release
        return share if release is None else partial(_release, release, share)

    def take_charged(
        self, call: CallState, charge: Admission | Awaitable[Admission], share: Release = None
    ) -> Release | Awaitable[Release]:
        """Return the function that releases the slot of a charged call; an awaitable if the limits are in a store."""
        if isinstance(charge, Awaitable):
            return self._when_charged(call, charge, share)
        if isinstance(charge, Throttled):
            raise charge.refusal()
        return charge

    async def _when_charged(self, call: CallState, charge: Awaitable[Admission], share: Release) -> Release:
        try:
            admission = await charge
            if isinstance(admission, Throttled):
                raise admission.refusal()
        except BaseException as problem:
            if share is not None:
                share()
            if isinstance(problem, StoreError):
                log.error("limits: call of %r refused, it cannot be counted: %s", call.name, problem)
                text = f"{call.name} was not called: it cannot be counted now; the server's log says why"
                raise Refused(Kind.UNRECORDED, text) from None
            raise
        return (
            partial(_release, admission, share) if admission is not None and share is not None else share or admission
        )

    async def reenter(self, call: CallState) -> Release:
        """Take a slot for a call that gave its slot back while a person decided; its rates are charged already."""
        if self.limiter is None:
            return None
        slot = self.take_share_and_slot(call, partial(self.limiter.take_slot, call.entry.limit_name))
        return await slot if isinstance(slot, Awaitable) else slot

    def repair(self, call: CallState) -> None:
        """Replace invalid arguments by their only valid reading, or refuse the call."""
        is_text = call.entry.kind != "tool"  # arguments of prompts and variables of templates come as texts
        repaired = repair(call.entry.input, call.arguments) if self.repairs or is_text else None
        if repaired is None:
            raise call.entry.bad_arguments(call.arguments)
        if is_text:
            call.sent, call.arguments = call.arguments, repaired[0]
            if call.entry.kind == "resource" and not _is_canonical(call.sent, call.arguments):
                raise call.entry.bad_arguments(call.sent)
            return
        call.sent = call.arguments
        call.arguments, call.repairs = repaired
        summary = ", ".join(f"{one_line(each.path)} as {each.became}" for each in call.repairs)
        log.info("tool %r: arguments repaired: %s", call.name, summary)

    def needs_approval(self, call: CallState) -> bool:
        """Return whether a person has to approve the call; refuse it if the policy denies it."""
        who, subject = call.principal, call.entry.subject
        call.decision = decision = self.policy.decide(who, subject, call.arguments, call.revision.name)
        if self.policy.audited:
            call.would_decide = tuple(self.policy.would_decide(who, subject, call.arguments, call.revision.name))
        if decision.verdict == "deny":
            raise self._denied(call.entry, who, decision, call.revision)
        if (
            decision.verdict == "allow"
            and subject.annotations.get("destructiveHint") is True
            and self.promises_to_ask(call.revision, call.client, call.is_identified)
        ):
            call.decision = decision = _PROMISED  # the client relies on the server, and has not asked its user
        if decision.verdict == "hide":  # by a rule about the time of day, since the tool was looked up
            raise unknown(call.entry.kind, call.name)
        return decision.verdict == "ask"

    async def obtain_approval(self, call: CallState) -> None:
        """Wait until a person approves the call, or use an earlier approval. Writing the intent consumes it."""
        entry, decision = call.entry, call.decision
        assert decision is not None
        request = ApprovalRequest(
            server=self.name,
            principal=owner_of(call.principal, call.address),
            tool=call.entry.label,
            fingerprint=entry.fingerprint,
            arguments=call.arguments,
            policy=self.policy.version,
            rule=decision.rule,
            why=decision.why,
            client=call.client.name[:100],
            schema=entry.tool.input_schema,
            title=title_of(entry),
            by=self.approval_queue.options.deciders(call.is_identified),
            remember=self.approval_queue.options.remember,
            source=encode([self.served_file, entry.source]).decode(),
            description=escape("" if entry.tool.description is UNSET else entry.tool.description[:MAX_DESCRIPTION]),
        )
        preview = None
        if entry.preview is not None:
            preview = partial(run_preview, entry.preview, call, self._preview_pool, _text_cleaner(self, call))
        try:
            grant = (
                None
                if await self.approval_queue.is_approved(request)
                else await self.approval_queue.find_grant(request)
            )
            if grant is not None:
                call.agreed = f"remembered {grant.id}"
                return
            call.approval = approval = await ApprovalFlow(call, request, self.approval_queue, preview).run()
        except (TrailError, StoreError) as problem:
            raise _unrecorded(call, problem) from None
        if approval.edited is not None:
            call.sent, call.reviewed_arguments = call.sent or call.arguments, call.arguments
            misplaced: list[tuple[str, str]] = []
            masked = self.mask_arguments(call.reviewed_arguments)  # in the caller's order; the stored ones are sorted
            call.arguments = unmask(call.reviewed_arguments, masked, approval.edited, "", misplaced)
            if entry.kind == "resource":
                misplaced = [("", "a resource is read by the URI that was asked for")]
            if misplaced or not entry.input.valid(call.arguments):
                await self.approval_queue.cancel(approval)
                why = misplaced[0][1] if misplaced else entry.bad_arguments(call.arguments).text
                raise Refused(Kind.DENIED, f"{call.name} was approved with other arguments, which are not valid: {why}")
            self.needs_approval(call)  # refuses what the policy denies; the person who edited them has approved them

    def promises_to_ask(self, revision: Revision, client: ClientInfo, is_identified: bool) -> bool:
        """Return whether the client lets the server ask its user about destructive tools, and the server can."""
        can_ask = "elicitation/create" in revision.input_methods and client.declares("elicitation.form")
        return (
            client.delegates_confirmation
            and can_ask
            and self.approval_queue.options.deciders(is_identified) in ("anyone", "caller")
        )

    async def record_intent(self, call: CallState) -> None:
        """Write the intent of a call and consume its approval, in one transaction."""
        changes = [self.approval_queue.consume_op(call.approval)] if call.approval is not None else []
        call.intended = done = True  # if the call is cancelled meanwhile, the record may be on the disk
        try:
            if call.trail is None:
                done = await self.store.commit(changes)
            else:
                done = await call.trail.write(intent_record(call, self.masking), changes)
        except (TrailError, StoreError) as problem:
            call.intended = False
            raise _unrecorded(call, problem) from None
        if not done:
            call.intended = False
            raise approval_used_up(call.name)
        if call.approval is not None:
            await self.approval_queue.publish_change(call.approval)

    def submit_intent(self, call: CallState, callback: Callable[[TrailError | None], None]) -> None:
        """Have the intent of a call without an approval written to disk; `callback` is called when it is there."""
        assert call.trail is not None
        call.intended = call.intent_pending = True  # a call that is cancelled meanwhile may find it written
        try:
            call.trail.submit(intent_record(call, self.masking), callback)
        except (TrailError, StoreError) as problem:
            call.intended = call.intent_pending = False
            raise _unrecorded(call, problem) from None

    def intent_failed(self, call: CallState, problem: TrailError) -> Refused:
        """Return what refuses a call whose intent could not be written."""
        call.intended = False
        return _unrecorded(call, problem)

    async def reissue_approval(self, call: CallState) -> None:
        """Make the approval valid for the retry of a call that ended with a question."""
        if call.approval is not None and call.revision.input_mode == "retry":
            try:
                ticket = await self.approval_queue.reissue(call.approval)
            except (TrailError, StoreError) as problem:
                log.error("approvals: approval of tool %r not reissued: %s", call.name, problem)
                text = f"{call.name} has asked something, which cannot be recorded now; the server's log says why"
                raise Refused(Kind.UNRECORDED, text) from None
            call.answered = {**call.answered, f"approval-{call.approval.id}": {"ticket": ticket}}

    def sanitize_result(
        self, call: CallState, result: ToolResult, *, is_clean: bool = False, is_doubtful: bool = False
    ) -> ToolResult | Coroutine[Any, Any, ToolResult]:
        """Return the result as it may leave; a coroutine if it is large, or was cut and the rest is to be stored."""
        if call.repairs:
            repaired = [{"path": each.path, "sent": each.sent, "became": each.became} for each in call.repairs]
            result = replace(result, meta={**({} if result.meta is UNSET else result.meta), REPAIRED: repaired})
        if self.sanitizer is None or is_clean:
            return result
        name = call.entry.limit_name
        if not is_doubtful and self.sanitizer.is_clean(name, result):
            return result
        if is_small(result):
            return self._finish_sanitizing(call, self.sanitizer, result, self.sanitizer.scan(name, result))
        return self._sanitize_in_thread(call, self.sanitizer, result)

    async def _sanitize_in_thread(self, call: CallState, sanitizer: Sanitizer, original: ToolResult) -> ToolResult:
        """Sanitize a large result without holding up the other calls."""
        scan = await self._cleaning_pool.run(partial(sanitizer.scan, call.entry.limit_name, original, copies=True))
        result = self._finish_sanitizing(call, sanitizer, original, scan)
        return result if isinstance(result, ToolResult) else await result

    def _finish_sanitizing(
        self, call: CallState, sanitizer: Sanitizer, original: ToolResult, scan: Scan
    ) -> ToolResult | Coroutine[Any, Any, ToolResult]:
        result, findings = sanitizer.finish(call.entry.limit_name, scan)
        if result is not original or findings:
            result = _mark_sanitized(call, original.structured, result, findings)
        kind = call.entry.kind
        if kind != "tool" and not result.is_error:  # whole, or an error
            withheld = [each.text for each in result.content if kind == "resource" and isinstance(each, Text)]
            if withheld or any(each.kind == "size" for each in findings):
                if self.truncated_results is not None:
                    self.truncated_results.take_unsaved()
                return error_result(withheld[0] if withheld else f"The {kind} {call.name} is larger than may be sent")
        if self.truncated_results is not None and self.truncated_results.unsaved:
            unsaved = self.truncated_results.take_unsaved()  # at once: the next result may be cut meanwhile
            return _save_remainder(self.truncated_results, unsaved, call, result)
        return result

    async def sanitize_message(self, params: Object) -> tuple[Json, Sequence[Finding]]:
        """Return a progress message, log message or question as it may leave, and the findings in it."""
        if self.sanitizer is None:
            return params, ()
        if is_small(params):
            return self.sanitizer.message(params)
        message: tuple[Json, Sequence[Finding]] = await self._cleaning_pool.run(
            partial(self.sanitizer.message, params, copies=True)
        )
        return message


_UNFIT = Text(
    "The data of this result is withheld: something in it may not leave, and without that it does not fit the tool's"
    " output schema. Here is the rest as text:"
)


def _mark_sanitized(call: CallState, sent: Json, result: ToolResult, findings: tuple[Finding, ...]) -> ToolResult:
    """Name in `_meta` what was changed, and withhold structured content that no longer fits its schema."""
    call.findings += findings
    left, schema = result.structured, None if result.is_error else call.entry.output
    if schema is not None and left is not sent and not schema.valid(left):
        result = replace(result, structured=UNSET, is_error=True, content=[_UNFIT, *result.content])
    reason = risk(findings) if findings else None
    meta = {} if result.meta is UNSET else result.meta
    added: Object = {SANITIZED: changed} if (changed := changes(call.findings)) else {}
    if reason is not None and RISK not in meta:  # the author's own words win
        added[RISK] = {"level": "dangerous", "reason": reason}
    return replace(result, meta={**meta, **added}) if added else result


async def _save_remainder(
    truncated_results: TruncatedResults, unsaved: list[tuple[str, str]], call: CallState, result: ToolResult
) -> ToolResult:
    """Store the rest of a truncated result, for `read_more`."""
    await truncated_results.save(unsaved, call.principal.id, result)
    return result


def _text_cleaner(guards: GuardSet, call: CallState) -> Callable[[str], str]:
    """Return a function that removes the secrets from a text about a call, those of its arguments too."""
    secret_texts = guards.secrets | set(_masked_texts(call.arguments, mask_secrets(call.arguments, guards.secrets)))

    def clean(text: str) -> str:
        return mask(text if guards.sanitizer is None else str(guards.sanitizer.value(text)), secret_texts)

    return clean


def _masked_texts(real: Json, masked: Json) -> Iterator[str]:
    """Yield the texts that a mask hides."""
    if type(real) is dict and type(masked) is dict:
        for inner, masked_value in zip(real.values(), masked.values(), strict=False):
            yield from _masked_texts(inner, masked_value)
    elif type(real) is list and type(masked) is list:
        for inner, masked_value in zip(real, masked, strict=False):
            yield from _masked_texts(inner, masked_value)
    elif real != masked:
        yield real if type(real) is str else encode(real).decode()


def _is_canonical(texts_by_name: Object, values: Object) -> bool:
    """Return whether each value is written in the one way that rules about URIs count on: 1, and not 1e0 or 1.0."""
    for name, value in values.items():
        value = int(value) if type(value) is float and value.is_integer() else value
        if texts_by_name.get(name, value) not in (value, encode(value).decode()):
            return False
    return True


def needs_scopes(entry: ToolEntry) -> Refused:
    text = f"{entry.name} needs the scope {' '.join(sorted(entry.scopes))}"
    return Refused(Kind.FORBIDDEN, text, needed_scopes=entry.scopes)


def unknown(kind: SubjectKind, name: str, near: str | None = None) -> Refused:
    """Return the refusal of a request for what does not exist, or is hidden from the caller."""
    if kind == "resource":
        return unknown_resource(name)
    refusal = Kind.UNKNOWN_TOOL if kind == "tool" else Kind.UNKNOWN_PROMPT
    return Refused(refusal, f"Unknown {kind}: {name[:200]}", {"didYouMean": near} if near else None)


Release = Callable[[], None] | None
"""Gives a concurrency slot back; None: the call took none."""


def _release(*places: Callable[[], None]) -> None:
    for release in places:
        release()


def owner_of(principal: Principal, address: str) -> str:
    """Return who owns what a call leaves behind: approvals, and sessions with upstream servers.

    Anonymous callers differ by network: one cannot use what belongs to another.
    """
    return f"{principal.id} from {network(address)}" if principal.id == ANONYMOUS else principal.id


def _unrecorded(call: CallState, problem: Exception) -> Refused:
    log.error("audit: intent of tool %r not written, not called: %s", call.name, problem)  # names a file: not for peers
    return Refused(Kind.UNRECORDED, f"{call.name} was not called: it cannot be recorded now; the server's log says why")
