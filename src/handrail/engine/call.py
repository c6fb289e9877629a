"""One `tools/call` in flight: who asks, what, by when, and how to reach back."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, cast

from msgspec import UNSET, Struct, UnsetType

from handrail import jsonrpc
from handrail.approvals.queue import Approval
from handrail.engine.catalog import ToolEntry
from handrail.engine.input_requests import Answer, Form, InputRequired, Question, Roots, Sample, Url
from handrail.errors import Kind, LocalProtocolError, Refused, RemoteProtocolError, ToolError
from handrail.guards.policy import Decision
from handrail.guards.sanitize import Finding, changes, merge_findings
from handrail.jsonrpc import Id
from handrail.model import SANITIZED, ClientInfo, InputRequest, Json, Object, Principal
from handrail.protocol.trace import Trace, read, read_headers
from handrail.revisions import Revision
from handrail.revisions.base import LEVELS
from handrail.schema.jsonable import to_jsonable
from handrail.schema.repair import RepairedArgument
from handrail.suggest import NOT_HERE, describe_value, suggest_names

if TYPE_CHECKING:
    from handrail.audit.log import Trail
    from handrail.engine.driving import CoroutineDriver
    from handrail.engine.inflight import InFlightCalls
    from handrail.engine.outcome import CallSink

STAGES = ("middleware", "limit", "validate", "approve", "intent", "run", "sanitize")
"""Of the pipeline, in its order."""
_MARKS_WHEN_RUNNING = STAGES.index("run") + 1  # marks of a call whose tool runs


P = ParamSpec("P")
M = TypeVar("M", bound=Callable[..., Any])

log = logging.getLogger("handrail")


def _notification_method(method: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, Awaitable[None]]:
    """Let a notification leave whether or not it is awaited; in a `def` tool there is nothing to await."""

    @wraps(method)
    def notify(*args: P.args, **options: P.kwargs) -> Awaitable[None]:
        call, coroutine = cast(Call, args[0]), method(*args, **options)
        running, loop = asyncio._get_running_loop(), call._flight.loop
        if running is loop:
            return _Notification(call, coroutine)
        if running is not None:  # of the tool's own, in a worker thread
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop), loop=running)
        call.blocking.wait(coroutine)
        return _Notification(call, None)

    return notify


def _waiting_method(method: M) -> M:
    """Let a `def` tool in a worker thread call a method without `await`: it waits there, and returns the answer."""

    @wraps(method)
    def start(call: Call, *args: Any, **options: Any) -> Any:
        coroutine = method(call, *args, **options)
        return coroutine if asyncio._get_running_loop() is not None else call.blocking.wait(coroutine)

    return cast(M, start)


class _Notification(Coroutine[Any, Any, None]):
    """A notification that leaves when it is awaited, else when it is dropped."""

    __slots__ = ("_call", "_coroutine", "_is_started")

    def __init__(self, call: Call, coroutine: Coroutine[Any, Any, None] | None) -> None:
        self._call = call
        self._coroutine = coroutine
        self._is_started = coroutine is None  # it has left already

    def __await__(self) -> Generator[Any, Any, None]:
        self._is_started = True
        if self._coroutine is not None:
            yield from self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        self._is_started = True
        if self._coroutine is None:
            raise StopIteration
        return self._coroutine.send(value)

    def throw(self, *problem: Any) -> Any:
        self._is_started = True
        if self._coroutine is None:
            raise problem[0]
        return self._coroutine.throw(*problem)

    def close(self) -> None:
        self._is_started = True
        if self._coroutine is not None:
            self._coroutine.close()

    def __del__(self) -> None:
        if not self._is_started and self._coroutine is not None:
            self._call._send_unawaited(self._coroutine)


class CallActivity(Protocol):
    """What one call does, as an observer records it."""

    def record_message(self, direction: Literal["in", "out"], message: bytes) -> None: ...
    def record_progress(self, done: float, total: float | None, message: str | None) -> None: ...
    def record_log(self, level: str, data: Json) -> None: ...
    def record_answer(self, answer: bytes | None) -> None: ...


@suggest_names(
    {
        "report_progress": "await call.progress(done, total, message)",
        "elicit": "await call.ask(message, form)",
        "elicit_form": "await call.ask(message, form)",
        "elicit_url": "await call.ask_url(message, url)",
        "create_message": "await call.sample(messages)",
        "list_roots": "await call.roots()",
        "send_log_message": 'await call.log("info", data)',
        **{level: f'await call.log("{level}", data)' for level in ("debug", "info", "warning", "error")},
        "request_id": "call.id",
        "client_id": "call.principal.id, or call.client for what the client says of itself",
        "request_context": "call.state for what the lifespan gave, call.principal and call.client for who asks",
        "lifespan_context": "call.state",
        "session": "the methods of the call itself",
        "read_resource": NOT_HERE,
    }
)
class Call(Struct, eq=False):
    """Handed to a tool that has a parameter of this type."""

    _flight: InFlightCalls  # the way back to the peer it came from
    id: Id
    entry: ToolEntry
    arguments: Object
    revision: Revision
    client: ClientInfo
    principal: Principal
    meta: Any  # of the request, as its revision reads it; unset: it had none
    reply: Callable[[bytes | None], None]  # where an answer goes that comes later; None: there will be none
    cancelled: bool = False  # readable from any thread
    timed_out: bool = False  # and so cancelled
    closed: bool = False  # ended or given up: nothing may be sent for it any more but the answer
    is_answered: bool = False  # answered, or it never will be
    level: int | None = None  # the log level the request itself named
    driver: CoroutineDriver | None = None  # while it is driven by hand
    task: asyncio.Task[Any] | None = None
    reply_future: asyncio.Future[None] | None = None  # done when it is over, if somebody waits for that
    timer: asyncio.TimerHandle | None = None
    last_activity: float = 0.0  # when there last was a sign of life
    waiting: int = 0  # questions open at the client; while there are any, the idle clock stands still
    answered: Mapping[str, Json] = {}  # answers this try has used; a retry will not be asked for them again
    answers: Mapping[str, Json] = {}  # answers a retry brought along
    questions: frozenset[Id] = frozenset()  # that are open at the client, or were
    sent: Object | None = None  # the arguments as they came, if they are others by now
    repairs: tuple[RepairedArgument, ...] = ()  # of the arguments
    findings: tuple[Finding, ...] = ()  # in the result
    message_findings: tuple[Finding, ...] = ()  # in progress, log messages and questions
    decision: Decision | None = None  # of the rules, where there was something to decide
    approval: Approval | None = None
    reviewed_arguments: Object | None = None  # the arguments a person was asked about, where it runs with others
    agreed: str = ""  # which question it was to a person, or what made one unnecessary
    trail: Trail | None = None  # what becomes of it is recorded there
    serial: str = ""  # its name there
    intended: bool = False  # from here on it may have had an effect
    recorded: bool = False  # how it ended
    sinks: tuple[CallSink, ...] = ()  # that were there when it started
    activity: CallActivity | None = None  # of a sink that follows what the call does
    is_preview: bool = False  # handed to a preview: it asks nothing
    marks: list[int] | None = None  # when it began and when each stage was over, in nanoseconds, if that is wanted
    unsent: frozenset[asyncio.Task[Any]] = frozenset()  # notifications that were not awaited, and have to wait
    _ask_count: int = 0
    _blocking_futures: frozenset[Future[Any]] = frozenset()  # what worker threads wait for on behalf of this call
    _progress: float = -math.inf
    _deadline: float | None = None
    _trace: Trace | UnsetType | None = UNSET

    @property
    def name(self) -> str:
        return self.entry.tool.name

    @property
    def deadline(self) -> float:
        """When the call will be given up, whatever it does, in the time of its event loop."""
        if self._deadline is None:
            self._deadline = self.now() + self.entry.total
        return self._deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        self._deadline = at

    @property
    def trace(self) -> Trace | None:
        """Which trace the client made the call in: `_meta` says so, else the headers of its request."""
        if self._trace is UNSET:
            self._trace = self.named_trace or read_headers(self._flight.trace_headers)
        return self._trace

    @property
    def named_trace(self) -> Trace | None:
        """That of `_meta` alone."""
        meta = self.meta
        return None if meta is UNSET else read(meta.traceparent, meta.tracestate, meta.baggage)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds in each stage of the pipeline."""
        marks = self.marks or []
        steps = zip(STAGES, marks, marks[1:], strict=False)  # one that was turned away has not met all of them
        return {name: (ended - begun) / 1e9 for name, begun, ended in steps}

    @property
    def server(self) -> str:
        return self._flight.engine.guard_set.name

    @property
    def address(self) -> str:
        """Where it came from: an address, `stdio` or `memory`."""
        return self._flight.address

    @property
    def over_http(self) -> bool:
        return self._flight.trace_headers is not None

    @property
    def is_identified(self) -> bool:
        """Whether the transport has verified who calls."""
        return self._flight.is_identified

    @property
    def state(self) -> Any:
        """What the server's lifespan gave."""
        return self.entry.owner.state

    @property
    def blocking(self) -> Blocking:
        """The same questions and notices, for `def` tools in a worker thread."""
        return Blocking(self, self._flight.loop)

    def now(self) -> float:
        """The time of its event loop."""
        return self._flight.loop.time()

    @_notification_method
    async def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """Tell how far the work is. Does nothing unless the client asked to be told; must grow."""
        try:
            finite = math.isfinite(done) and (total is None or math.isfinite(total))
        except TypeError:
            meant = "numbers first, then a text: progress(1, 2, 'half')"
            raise TypeError(
                f"progress: expected {meant}; got {describe_value(done)}, {describe_value(total)}"
            ) from None
        if not finite:
            raise ValueError("progress: a number that is finite")
        self.last_activity = self.now()
        if self.activity is not None and not self.waiting:  # else it only is a sign of life
            self.activity.record_progress(done, total, message)
        token = UNSET if self.meta is UNSET else self.meta.progress_token
        if token is UNSET or self.closed or done <= self._progress:
            return
        params: Object = {"progressToken": token, "progress": done}
        if total is not None:
            params["total"] = total
        if message is not None and self.revision.progress_message:
            params |= await self._sanitize_params({"message": message})
            if done <= self._progress:  # another went by meanwhile
                return
        self._progress = done
        await self._flight.notify(self, jsonrpc.notification("notifications/progress", params))

    @_notification_method
    async def log(self, level: str, data: Json, *, logger: str | None = None) -> None:
        """Send a log message to the client, if it wants messages of this level."""
        if level not in LEVELS:
            raise ValueError(f"log: {level!r} is not one of {', '.join(LEVELS)}")
        if self.activity is not None:
            self.activity.record_log(level, data)
        if self.closed or LEVELS.index(level) < self._flight.log_floor(self):
            return
        params: Object = {"level": level, "data": to_jsonable(data)}
        if logger is not None:
            params["logger"] = logger
        await self._flight.notify(
            self, jsonrpc.notification("notifications/message", await self._sanitize_params(params))
        )

    @_waiting_method
    async def ask(self, message: str, form: type | Mapping[str, Json], *, key: str | None = None) -> Answer:
        """Ask the user to fill in a form.

        A client of a stateless revision gets the question as the answer to its call and calls again: the tool then
        runs from the top, so whatever stands before an `ask` must be safe to repeat.
        """
        answer: Answer = await self._ask_one(Form(message, form), key)
        return answer

    @_waiting_method
    async def ask_url(self, message: str, url: str, *, key: str | None = None) -> Answer:
        """Ask the user to visit a page: the only way to ask for secrets."""
        answer: Answer = await self._ask_one(Url(message, url), key)
        return answer

    @_waiting_method
    async def sample(
        self, messages: str | Sequence[Object], *, max_tokens: int = 1000, key: str | None = None, **more: Json
    ) -> Object:
        """Let the client's model answer; gives `{"role", "content", "model", …}`."""
        answer: Object = await self._ask_one(Sample(messages, max_tokens=max_tokens, **more), key)
        return answer

    @_waiting_method
    async def roots(self, *, key: str | None = None) -> list[Object]:
        """The folders the client works in."""
        folders: list[Object] = await self._ask_one(Roots(), key)
        return folders

    @_waiting_method
    async def ask_all(self, questions: Mapping[str, Question]) -> dict[str, Any]:
        """Ask several things in one round."""
        if self.is_preview:
            raise ToolError("a preview cannot ask questions")
        missing = [
            each.capability for each in questions.values() if not self._takes(each.request.method, each.capability)
        ]
        if missing:
            raise _missing_capabilities(missing)
        if self.revision.input_mode == "retry":
            return await self._answers_from_retry(questions)
        tasks = [asyncio.ensure_future(self._ask_by_request(each)) for each in questions.values()]
        try:
            return dict(zip(questions, await asyncio.gather(*tasks), strict=True))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def can_ask(self, capability: str) -> bool:
        """Whether the user can be asked, by `"elicitation.form"` or `"elicitation.url"`."""
        reachable = self.revision.input_mode == "retry" or self._flight.two_way
        return reachable and self._takes("elicitation/create", capability)

    def _takes(self, method: str, capability: str) -> bool:
        return method in self.revision.input_methods and self.client.declares(capability)

    def require(self, capability: str) -> None:
        """Go on only if the client declared a capability such as `"sampling"` or `"elicitation.form"`."""
        if not self.client.declares(capability):
            raise _missing_capabilities([capability])

    def cancel(self) -> None:
        """Somebody at the server has had enough of it; its caller is told so."""
        self._flight.cancel(self)

    def cancel_work(self, *, at_once: bool = True) -> None:
        """Nobody wants the answer any more: end the work as far as it can be ended.

        Not `at_once`: a thread that runs the tool is left to see by itself that it is not wanted, and waited for.
        """
        self.cancelled = self.closed = True
        for request_id in self.questions:
            self._flight.cancel_input_request(self, request_id)
        for future in self._blocking_futures:
            future.cancel()
        in_thread = self.entry.mode == "thread" and self.marks is not None and len(self.marks) == _MARKS_WHEN_RUNNING
        if self.task is not None and (at_once or not in_thread):
            self.task.cancel()
        elif self.driver is not None:
            self.driver(asyncio.CancelledError())

    @_waiting_method
    async def close_stream(self) -> None:
        """Let go of the answer's stream for a while, where the transport has one; the client fetches the rest later."""
        await self._flight.close_stream(self)

    def _send_unawaited(self, notification: Coroutine[Any, Any, None]) -> None:
        """Send what a tool did not await, in its order and before the answer."""
        loop = self._flight.loop
        if asyncio._get_running_loop() is not loop:  # the garbage collector runs in any thread
            try:
                loop.call_soon_threadsafe(self._send_unawaited, notification)
            except RuntimeError:  # the loop has closed: no peer is left
                notification.close()
            return
        if self.unsent:
            notification = _send_after(self.unsent, notification)
        task = self._flight.engine.task_starter(loop)(notification)
        if not task.done():
            self.unsent |= {task}
        task.add_done_callback(partial(_on_unawaited_sent, self))

    async def _ask_one(self, question: Question, key: str | None) -> Any:
        self._ask_count += 1
        name = f"ask-{self._ask_count}" if key is None else key
        return (await self.ask_all({name: question}))[name]

    async def _input_request(self, question: Question) -> InputRequest:
        request = question.request
        params = (
            request.params
            if isinstance(question, Form) and question.as_is
            else await self._sanitize_params(request.params)
        )
        return InputRequest(request.method, self.revision.encode_input(request.method, params))

    async def _sanitize_params(self, params: Object) -> Object:
        """The params of a message as they may leave, with what was changed in their `_meta`."""
        cleaned: Object
        cleaned, findings = await self._flight.engine.guard_set.sanitize_message(params)
        if findings:
            self.message_findings = merge_findings([*self.message_findings, *findings])
            if changed := changes(findings):
                cleaned = {**cleaned, "_meta": {**cleaned.get("_meta", {}), SANITIZED: changed}}
        return cleaned

    async def _ask_by_request(self, question: Question) -> Any:
        request = question.request
        sanitized = await self._input_request(question)
        self.waiting += 1
        try:
            answer = await self._flight.request_input(self, sanitized)
        except RemoteProtocolError as problem:
            if request.method == "elicitation/create":
                return Answer("cancel")
            raise ToolError(f"The client did not answer {request.method}: {problem}") from None
        finally:
            self.waiting -= 1
            self.last_activity = self.now()
        return question.read(self.revision.decode_input(request.params, answer))

    async def _answers_from_retry(self, questions: Mapping[str, Question]) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        for key in [key for key in questions if key in self.answers]:
            with contextlib.suppress(ToolError):  # an answer that does not fit is no answer: ask again
                answers[key] = questions[key].read(self.answers[key])
                self.answered = {**self.answered, key: self.answers[key]}
        if len(answers) < len(questions):
            raise InputRequired(
                {key: await self._input_request(each) for key, each in questions.items() if key not in answers}
            )
        return answers


async def _send_after(earlier: frozenset[asyncio.Task[Any]], coroutine: Coroutine[Any, Any, None]) -> None:
    await asyncio.wait(earlier)
    await coroutine


def _on_unawaited_sent(call: Call, task: asyncio.Task[None]) -> None:
    call.unsent -= {task}
    if not task.cancelled() and (problem := task.exception()) is not None:
        log.error("tool %r: a notification that was not awaited was not sent: %s", call.name, problem)


def _missing_capabilities(capabilities: Sequence[str]) -> Refused:
    """Says what the client would have had to declare: `{"elicitation": {"form": {}}}`."""
    required: Object = {}
    for capability in capabilities:
        branch = required
        for name in capability.split("."):
            branch = branch.setdefault(name, {})
    text = f"Client capability required: {', '.join(capabilities)}"
    return Refused(Kind.NEEDS_CAPABILITY, text, {"requiredCapabilities": required})


class Blocking:
    """`Call`'s methods for code that cannot await: `call.blocking.ask(…)` waits in the calling thread."""

    def __init__(self, call: Call, loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        method = inspect.unwrap(getattr(Call, name)) if name in vars(Call) else None
        if not inspect.iscoroutinefunction(method):
            return getattr(self._call, name)
        return lambda *args, **options: self.wait(method(self._call, *args, **options))

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if asyncio._get_running_loop() is not None:
            coroutine.close()
            raise LocalProtocolError("call.blocking is for `def` tools in a worker thread; here, await the method")
        call = self._call
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        call._blocking_futures |= {future}
        if call.cancelled:
            future.cancel()
        try:
            return future.result()
        except CancelledError:
            # As for a task: not an `Exception`, so that a tool does not go on after a cancelled question.
            raise asyncio.CancelledError from None
        finally:
            call._blocking_futures -= {future}
