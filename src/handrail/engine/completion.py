"""Completion: values that an argument of a prompt, or a variable of a template, could have."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from handrail.engine.eager import ThreadPool
from handrail.errors import Kind, Refused, SchemaError
from handrail.jsonrpc import encode
from handrail.model import Object, Principal
from handrail.revisions.base import MAX_COUNTED_COMPLETIONS
from handrail.suggest import closest, describe_value, mapping

if TYPE_CHECKING:
    from handrail.engine.catalog import ToolEntry

log = logging.getLogger("handrail")

COMPLETION_SECONDS = 10.0
COMPLETION_THREADS = 8


class Completer(Struct, frozen=True):
    """What completes one argument: a function, or the choices of its type."""

    function: Callable[..., Any]
    takes_context: bool
    takes_peer: bool = False  # after the context


class RequestPeer(Protocol):
    """Who asks for values."""

    principal: Principal
    address: str


class CompletionPool:
    """The threads that run functions of completion; a caller has at most half of them."""

    def __init__(self) -> None:
        self._threads = ThreadPool(COMPLETION_THREADS)
        self._running: Counter[str] = Counter()  # by caller; a function goes on when its request has timed out

    async def run(self, caller: str, function: Callable[[], list[str]]) -> list[str]:
        most = COMPLETION_THREADS // 2
        if self._running[caller] >= most:
            raise Refused(Kind.OVERLOADED, f"{most} completions of this caller are running; wait for one to end")
        self._running[caller] += 1
        loop = asyncio.get_running_loop()

        def on_end() -> None:  # in the thread, or here if it never began
            with suppress(RuntimeError):  # the loop has closed
                loop.call_soon_threadsafe(self._running.subtract, (caller,))

        values: list[str] = await self._threads.run(function, ended=on_end)
        return values


async def find_values(entry: ToolEntry, params: Any, pool: CompletionPool, peer: RequestPeer) -> list[str]:
    """Return the values that the argument of a `completion/complete` could have, the best ones first."""
    completer = entry.complete.get(params.argument.name)
    if completer is None:
        return []
    function = completer.function
    count = 1 + completer.takes_context + completer.takes_peer
    arguments = (params.argument.value, known_arguments(params), peer)[:count]
    caller = f"{peer.principal.id} {peer.address}"
    try:
        async with asyncio.timeout(COMPLETION_SECONDS):
            if inspect.iscoroutinefunction(function):
                return _texts(await function(*arguments))
            return await pool.run(caller, lambda: _texts(function(*arguments)))
    except TimeoutError:
        raise Refused(Kind.TIMEOUT, f"The completion took longer than {COMPLETION_SECONDS:g} s") from None
    except BaseException as problem:
        task = asyncio.current_task()
        if isinstance(problem, Refused | GeneratorExit) or (task is not None and task.cancelling()):
            raise
        log.error("completion of %r failed", entry.name, exc_info=problem)
        raise Refused(Kind.INTERNAL, "The completion failed; the server's log has the details") from None


def known_arguments(params: Any) -> dict[str, str]:
    """Return the arguments that have values already; not every revision sends them."""
    context = getattr(params, "context", None)
    return {} if context is None else dict(context.arguments)


def make_completers(functions: Any, schema: Object, where: str) -> dict[str, Completer]:
    """Return the completers by argument: those of the author, and of every argument that is a choice."""
    properties = schema.get("properties", {})
    completers = {
        name: Completer(_choose_from(choices), takes_context=False)
        for name, each in properties.items()
        if (choices := _choices(each, schema.get("$defs", {})))
    }
    for name, function in mapping(f"{where}: complete", functions or {}, "functions by argument").items():
        if name not in properties:
            near = closest(name, properties)
            raise SchemaError(
                f"{where}: complete: no argument {name!r}" + (f"; did you mean {near!r}?" if near else "")
            )
        if not callable(function):
            raise SchemaError(f"{where}: complete: {name}: expected a function, got {describe_value(function)}")
        try:
            count = len(inspect.signature(function).parameters)
        except ValueError:  # a built-in function has no signature
            count = 1
        if count not in (1, 2):
            raise SchemaError(f"{where}: complete: {name}: the function takes (value) or (value, context)")
        completers[name] = Completer(function, takes_context=count == 2)
    return completers


def _choices(schema: Object, definitions: Object) -> list[str]:
    """Return the values of a schema that has only so many, as texts; empty for any other."""
    if "$ref" in schema:
        return _choices(definitions.get(schema["$ref"].rpartition("/")[2], {}), {})
    if schema.get("type") == "boolean":
        return ["true", "false"]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    choices = [each if type(each) is str else encode(each).decode() for each in values if each is not None]
    return choices or [choice for each in schema.get("anyOf", ()) for choice in _choices(each, definitions)]


def _choose_from(choices: list[str]) -> Callable[[str], list[str]]:
    return lambda value: [each for each in choices if each.lower().startswith(value.lower())]


def _texts(values: Iterable[str]) -> list[str]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"a completion is a list of texts, not {describe_value(values)}")
    texts = [*islice(values, MAX_COUNTED_COMPLETIONS + 1)]
    for each in texts:
        if not isinstance(each, str):
            raise TypeError(f"a completion is a list of texts; one of them is {describe_value(each)}")
    return texts
