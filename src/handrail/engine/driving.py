"""Calls without a task.

Most calls wait for nothing but the disk. A task and a future for that would cost more than all the guards together. So
their coroutine is driven by hand: it awaits its own `Course`, and whoever has written the record goes on with it. On
the way nothing may ask for the current task, as timeouts do; before something might, the call does `await TASK`, and
goes on in one. After the intent every tool that is `async` does.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, Self

from handrail.model import ToolResult

if TYPE_CHECKING:
    from handrail.engine.call import Call
    from handrail.engine.inflight import Flight

__all__ = ["TASK", "Course"]


class Course:
    """A call on its way. Awaited by itself, once; called when that is over, with the problem there was."""

    __slots__ = ("_call", "_context", "_coroutine", "_flight", "_is_over", "_problem", "_waits")

    def __init__(
        self, flight: Flight, call: Call, coroutine: Coroutine[Any, Any, ToolResult], context: Context
    ) -> None:
        self._flight = flight
        self._call = call
        self._coroutine = coroutine
        self._context = context
        self._is_over = self._waits = False
        self._problem: BaseException | None = None

    def go(self) -> bytes:
        """Until the call has ended, or has to wait."""
        flight, call, coroutine = self._flight, self._call, self._coroutine
        try:
            waits_for = self._context.run(coroutine.send, None)
        except StopIteration as end:
            return flight.ended(call, end.value)
        except BaseException as problem:
            return flight.ended(call, problem)
        if waits_for is TASK:
            return flight.run(call, coroutine, self._context)
        return flight.hold(call)

    def __call__(self, problem: BaseException | None = None) -> None:
        if self._is_over:
            return
        self._is_over, self._problem = True, problem
        if self._waits:
            flight, call = self._flight, self._call
            if problem is not None or call.entry.mode == "inline":
                flight.reply(call, self.go())
            else:
                flight.reply(call, flight.run(call, self._coroutine, self._context))

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Self:
        if not self._is_over:
            self._waits = True
            return self
        if self._problem is not None:
            raise self._problem
        raise StopIteration


class _Task:
    def __await__(self) -> Generator[_Task, None, None]:
        yield self


TASK = _Task()
