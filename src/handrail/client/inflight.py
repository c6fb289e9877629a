"""A request in flight, its clocks, and what is heard of it on the way."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator

from msgspec import Struct

from handrail.errors import CallTimeout, PeerError, Sent
from handrail.model import Json, Object
from handrail.options import seconds
from handrail.transports.base import PendingRequest


class Clocks(Struct, frozen=True):
    """How long to wait, in seconds: to connect, for a first sign of life, between two of them, and in all."""

    connect: float = 10.0
    first: float = 30.0
    idle: float = 60.0
    total: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            seconds(f"Clocks: {name}", getattr(self, name))

    def within(self, timeout: float | Clocks | None) -> Clocks:
        """These, but no longer than so many seconds in all."""
        if timeout is None or isinstance(timeout, Clocks):
            return timeout or self
        most = seconds("timeout", timeout)
        return Clocks(min(most, self.connect), min(most, self.first), min(most, self.idle), most)


class Progress(Struct, frozen=True):
    """How far a call has got, in the server's own words."""

    done: float
    total: float | None = None
    message: str = ""

    @classmethod
    def read(cls, params: Object) -> Progress | None:
        done: Json = params.get("progress")
        total: Json = params.get("total")
        message: Json = params.get("message")
        if not _is_number(done):
            return None
        return cls(done, total if _is_number(total) else None, message if type(message) is str else "")


class Log(Struct, frozen=True):
    """What a server had to say."""

    level: str
    data: Json
    logger: str = ""


class InFlightRequest(PendingRequest, kw_only=True):
    """A request in flight, with its clocks."""

    clocks: Clocks
    last_activity: float  # when something was heard of it
    check_at: float  # when to look at its clocks
    total_deadline: float
    has_activity: bool = False
    progress: Progress | None = None
    on_event: Callable[[Progress | Log], None] | None = None


@contextlib.asynccontextmanager
async def deadline_at(deadline: float, clocks: Clocks, sent: Sent = Sent.NO) -> AsyncIterator[None]:
    """Do what a request needs besides being answered, in the time it has; it has got so far (`sent`)."""
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise CallTimeout(f"not done within {clocks.total:g} s", clock="total", sent=sent) from None
    except PeerError as problem:
        problem.sent = Sent.NO if sent is Sent.NO else problem.sent
        raise


@contextlib.contextmanager
def keep_sent(first: Sent) -> Iterator[None]:
    """What came before has got so far; what fails now does not undo it."""
    try:
        yield
    except PeerError as problem:
        problem.sent = first if problem.sent is Sent.NO else problem.sent
        raise


def _is_number(value: Json) -> bool:
    """Also one that can be shown: there are integers that no float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def format_progress(progress: Progress) -> str:
    done = f"{progress.done:g}" if progress.total is None else f"{progress.done:g} of {progress.total:g}"
    return f"{done} ({progress.message[:100]})" if progress.message else done
