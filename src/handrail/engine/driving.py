"""Calls without a task.

Most calls wait for nothing but the disk. A task and a future for that would cost more than all the guards together. So
their coroutine is driven by hand: it awaits its own `CoroutineDriver`, and the writer of the record goes on with it.
On the way nothing may ask for the current task, as timeouts do; before something might, the call does `await TASK`, and
goes on in one. After the intent every tool that is `async` does.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, Self

from handrail.model import ToolResult

if TYPE_CHECKING:
    from handrail.engine.call import Call
    from handrail.engine.inflight import InFlightCalls

__all__ = ["NEEDS_TASK", "CoroutineDriver"]


class CoroutineDriver:
    """A call on its way. Awaited by itself, once; called when that is over, with the problem there was."""

    __slots__ = ("_call", "_context", "_coroutine", "_flight", "_is_done", "_is_waiting", "_problem")

    def __init__(
        self, flight: InFlightCalls, call: Call, coroutine: Coroutine[Any, Any, ToolResult], context: Context
    ) -> None:
        self._flight = flight
        self._call = call
        self._coroutine = coroutine
        self._context = context
        self._is_done = self._is_waiting = False
        self._problem: BaseException | None = None

    def step(self) -> bytes:
        """Until the call has ended, or has to wait."""
        flight, call, coroutine = self._flight, self._call, self._coroutine
        try:
            waits_for = self._context.run(coroutine.send, None)
        except StopIteration as end:
            return flight.finish_call(call, end.value)
        except BaseException as problem:
            return flight.finish_call(call, problem)
        if waits_for is NEEDS_TASK:
            return flight.run(call, coroutine, self._context)
        return flight.register(call)

    def __call__(self, problem: BaseException | None = None) -> None:
        if self._is_done:
            return
        self._is_done, self._problem = True, problem
        if self._is_waiting:
            flight, call = self._flight, self._call
            if problem is not None or call.entry.mode == "inline":
                flight.reply(call, self.step())
            else:
                flight.reply(call, flight.run(call, self._coroutine, self._context))

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Self:
        if not self._is_done:
            self._is_waiting = True
            return self
        if self._problem is not None:
            raise self._problem
        raise StopIteration


class _NeedsTask:
    def __await__(self) -> Generator[_NeedsTask, None, None]:
        yield self


NEEDS_TASK = _NeedsTask()
