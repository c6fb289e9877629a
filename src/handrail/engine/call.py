"""`Call`: a tool's view of its call, and its way to the client while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, cast

from msgspec import UNSET, Struct

from handrail import jsonrpc
from handrail.engine.call_state import CallState
from handrail.engine.input_requests import Answer, Form, InputRequired, Question, Roots, Sample, Url
from handrail.errors import Kind, LocalProtocolError, Refused, RemoteProtocolError, ToolError
from handrail.guards.sanitize import changes, merge_findings
from handrail.jsonrpc import Id
from handrail.model import SANITIZED, ClientInfo, InputRequest, Json, Object, Principal
from handrail.protocol.trace import Trace
from handrail.revisions import Revision
from handrail.revisions.base import LEVELS
from handrail.schema.jsonable import to_jsonable
from handrail.suggest import describe_value, suggest_names

P = ParamSpec("P")
M = TypeVar("M", bound=Callable[..., Any])

log = logging.getLogger("handrail")


def _notification_method(method: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, Awaitable[None]]:
    """Send a notification whether or not it is awaited; a `def` tool cannot await."""

    @wraps(method)
    def notify(*args: P.args, **options: P.kwargs) -> Awaitable[None]:
        call, coroutine = cast(Call, args[0]), method(*args, **options)
        running, loop = asyncio._get_running_loop(), call._state.calls.loop
        if running is loop:
            return _Notification(call, coroutine)
        if running is not None:  # an event loop that the tool runs in a worker thread
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop), loop=running)
        call.blocking.wait(coroutine)
        return _Notification(call, None)

    return notify


def _waiting_method(method: M) -> M:
    """Let a `def` tool in a worker thread call a method without `await`; the thread waits for the answer."""

    @wraps(method)
    def start(call: Call, *args: Any, **options: Any) -> Any:
        coroutine = method(call, *args, **options)
        return coroutine if asyncio._get_running_loop() is not None else call.blocking.wait(coroutine)

    return cast(M, start)


class _Notification(Coroutine[Any, Any, None]):
    """A notification that is sent when it is awaited, or else when it is garbage collected."""

    __slots__ = ("_call", "_coroutine", "_is_started")

    def __init__(self, call: Call, coroutine: Coroutine[Any, Any, None] | None) -> None:
        self._call = call
        self._coroutine = coroutine
        self._is_started = coroutine is None  # it was sent already

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
        "read_resource": "the function that gives the resource",
    }
)
class Call(Struct, eq=False):
    """One call of a tool, read of a resource, or get of a prompt.

    For functions that have a parameter of this type, for previews and for middleware.
    """

    _state: CallState

    @property
    def id(self) -> Id:
        """The id of the request."""
        return self._state.id

    @property
    def method(self) -> str:
        """The method of the request: `tools/call`, `resources/read` or `prompts/get`."""
        return self._state.entry.method

    @property
    def name(self) -> str:
        """The name of the tool or of the prompt, or the URI of the resource."""
        return self._state.entry.tool.name

    @property
    def arguments(self) -> Object:
        """The arguments; middleware may change them before they are validated."""
        return self._state.arguments

    @arguments.setter
    def arguments(self, arguments: Object) -> None:
        self._state.arguments = arguments

    @property
    def server(self) -> str:
        """The name of the server."""
        return self._state.server

    @property
    def state(self) -> Any:
        """What the server's lifespan returned."""
        return self._state.entry.owner.state

    @property
    def client(self) -> ClientInfo:
        """The client software, by its own account."""
        return self._state.client

    @property
    def principal(self) -> Principal:
        """The caller, as the transport identified it."""
        return self._state.principal

    @property
    def address(self) -> str:
        """Where the call came from: an IP address, `unix`, `stdio` or `memory`."""
        return self._state.address

    @property
    def revision(self) -> Revision:
        """The revision of the protocol."""
        return self._state.revision

    @property
    def trace(self) -> Trace | None:
        """The trace of the client: `_meta` names it, else the headers of the HTTP request."""
        return self._state.trace

    @property
    def cancelled(self) -> bool:
        """Whether the call was cancelled or timed out; readable from any thread."""
        return self._state.cancelled

    @property
    def deadline(self) -> float:
        """The time of the total timeout, by the clock of the event loop; readable from any thread."""
        return self._state.deadline

    @deadline.setter
    def deadline(self, at: float) -> None:
        self._state.deadline = at

    @property
    def blocking(self) -> Blocking:
        """The same questions and notifications, for `def` tools in a worker thread."""
        return Blocking(self)

    @_notification_method
    async def progress(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """Report progress, if the client asked for it. `done` must grow."""
        state = self._state
        try:
            finite = math.isfinite(done) and (total is None or math.isfinite(total))
        except TypeError:
            meant = "numbers first, then a text: progress(1, 2, 'half')"
            raise TypeError(
                f"progress: expected {meant}; got {describe_value(done)}, {describe_value(total)}"
            ) from None
        if not finite:
            raise ValueError("progress: a number that is finite")
        state.last_activity = state.now()
        if state.activity is not None and not state.waiting:  # during a question, progress only resets the idle timeout
            state.activity.record_progress(done, total, message)
        token = UNSET if state.meta is UNSET else state.meta.progress_token
        if token is UNSET or state.closed or done <= state.progress:
            return
        params: Object = {"progressToken": token, "progress": done}
        if total is not None:
            params["total"] = total
        if message is not None and state.revision.progress_message:
            params |= await self._sanitize_params({"message": message})
            if done <= state.progress:  # a later one was sent meanwhile
                return
        state.progress = done
        await state.calls.notify(state, jsonrpc.notification("notifications/progress", params))

    @_notification_method
    async def log(self, level: str, data: Json, *, logger: str | None = None) -> None:
        """Send a log message to the client, if it wants messages of this level."""
        if level not in LEVELS:
            raise ValueError(f"log: {level!r} is not one of {', '.join(LEVELS)}")
        state = self._state
        if state.activity is not None:
            state.activity.record_log(level, data)
        if state.closed or LEVELS.index(level) < state.log_floor:
            return
        params: Object = {"level": level, "data": to_jsonable(data)}
        if logger is not None:
            params["logger"] = logger
        await state.calls.notify(
            state, jsonrpc.notification("notifications/message", await self._sanitize_params(params))
        )

    @_waiting_method
    async def ask(self, message: str, form: type | Mapping[str, Json], *, key: str | None = None) -> Answer:
        """Ask the user to fill in a form.

        A client of a stateless revision gets the question as the answer to its call and calls again: the tool then
        runs from the top, so everything before an `ask` must be safe to repeat.
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
        """Ask the client's model; return `{"role", "content", "model", …}`."""
        answer: Object = await self._ask_one(Sample(messages, max_tokens=max_tokens, **more), key)
        return answer

    @_waiting_method
    async def roots(self, *, key: str | None = None) -> list[Object]:
        """Return the folders that the client works in."""
        folders: list[Object] = await self._ask_one(Roots(), key)
        return folders

    @_waiting_method
    async def ask_all(self, questions: Mapping[str, Question]) -> dict[str, Any]:
        """Ask several questions in one round."""
        state = self._state
        if state.is_preview:
            raise ToolError("a preview cannot ask questions")
        missing = [
            each.capability for each in questions.values() if not state.accepts(each.request.method, each.capability)
        ]
        if missing:
            raise _missing_capabilities(missing)
        if state.revision.input_mode == "retry":
            return await self._answers_from_retry(questions)
        tasks = [asyncio.ensure_future(self._ask_by_request(each)) for each in questions.values()]
        try:
            return dict(zip(questions, await asyncio.gather(*tasks), strict=True))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def require(self, capability: str) -> None:
        """End the call unless the client declared a capability such as `"sampling"` or `"elicitation.form"`."""
        if not self._state.client.declares(capability):
            raise _missing_capabilities([capability])

    @_waiting_method
    async def close_stream(self) -> None:
        """Close the response stream, if the transport has one; the client fetches the rest later."""
        self._state.calls.close_stream(self._state)

    def _send_unawaited(self, notification: Coroutine[Any, Any, None]) -> None:
        """Send a notification that the tool did not await: in order, and before the response."""
        state, loop = self._state, self._state.calls.loop
        if asyncio._get_running_loop() is not loop:  # garbage collection runs in any thread
            try:
                loop.call_soon_threadsafe(self._send_unawaited, notification)
            except RuntimeError:  # the loop has closed: no peer is left
                notification.close()
            return
        if state.unsent:
            notification = _send_after(state.unsent, notification)
        task = state.calls.start_task(notification)
        if not task.done():
            state.unsent |= {task}
        task.add_done_callback(partial(_on_unawaited_sent, state))

    async def _ask_one(self, question: Question, key: str | None) -> Any:
        state = self._state
        state.ask_count += 1
        name = f"ask-{state.ask_count}" if key is None else key
        return (await self.ask_all({name: question}))[name]

    async def _input_request(self, question: Question) -> InputRequest:
        request = question.request
        params = (
            request.params
            if isinstance(question, Form) and question.as_is
            else await self._sanitize_params(request.params)
        )
        return InputRequest(request.method, self._state.revision.encode_input(request.method, params))

    async def _sanitize_params(self, params: Object) -> Object:
        """Return the params of a message sanitized; their `_meta` names the changes."""
        state = self._state
        cleaned: Object
        cleaned, findings = await state.calls.sanitize_message(params)
        if findings:
            state.message_findings = merge_findings([*state.message_findings, *findings])
            if changed := changes(findings):
                cleaned = {**cleaned, "_meta": {**cleaned.get("_meta", {}), SANITIZED: changed}}
        return cleaned

    async def _ask_by_request(self, question: Question) -> Any:
        state, request = self._state, question.request
        sanitized = await self._input_request(question)
        state.waiting += 1
        try:
            answer = await state.calls.request_input(state, sanitized)
        except RemoteProtocolError as problem:
            if request.method == "elicitation/create":
                return Answer("cancel")
            raise ToolError(f"The client did not answer {request.method}: {problem}") from None
        finally:
            state.waiting -= 1
            state.last_activity = state.now()
        return question.read(state.revision.decode_input(request.params, answer))

    async def _answers_from_retry(self, questions: Mapping[str, Question]) -> dict[str, Any]:
        state = self._state
        answers: dict[str, Any] = {}
        for key in [key for key in questions if key in state.answers]:
            with contextlib.suppress(ToolError):  # an answer that does not fit the question is asked for again
                answers[key] = questions[key].read(state.answers[key])
                state.answered = {**state.answered, key: state.answers[key]}
        if len(answers) < len(questions):
            raise InputRequired(
                {key: await self._input_request(each) for key, each in questions.items() if key not in answers}
            )
        return answers


async def _send_after(earlier: frozenset[asyncio.Task[Any]], coroutine: Coroutine[Any, Any, None]) -> None:
    await asyncio.wait(earlier)
    await coroutine


def _on_unawaited_sent(call: CallState, task: asyncio.Task[None]) -> None:
    call.unsent -= {task}
    if not task.cancelled() and (problem := task.exception()) is not None:
        log.error("tool %r: a notification that was not awaited was not sent: %s", call.name, problem)


def _missing_capabilities(capabilities: Sequence[str]) -> Refused:
    """Return the error that names the missing capabilities: `{"elicitation": {"form": {}}}`."""
    required: Object = {}
    for capability in capabilities:
        branch = required
        for name in capability.split("."):
            branch = branch.setdefault(name, {})
    text = f"Client capability required: {', '.join(capabilities)}"
    return Refused(Kind.NEEDS_CAPABILITY, text, {"requiredCapabilities": required})


class Blocking:
    """The methods of `Call` for code that cannot await: `call.blocking.ask(…)` waits in the calling thread."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Any:
        method = inspect.unwrap(getattr(Call, name)) if name in vars(Call) else None
        if not inspect.iscoroutinefunction(method):
            return getattr(self._call, name)
        return lambda *args, **options: self.wait(method(self._call, *args, **options))

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if asyncio._get_running_loop() is not None:
            coroutine.close()
            raise LocalProtocolError("call.blocking is for `def` tools in a worker thread; here, await the method")
        call = self._call._state
        future = asyncio.run_coroutine_threadsafe(coroutine, call.calls.loop)
        call.blocking_futures |= {future}
        if call.cancelled:
            future.cancel()
        try:
            return future.result()
        except CancelledError:
            # As in a task, not an `Exception`: a tool must not go on after a cancelled question.
            raise asyncio.CancelledError from None
        finally:
            call.blocking_futures -= {future}
