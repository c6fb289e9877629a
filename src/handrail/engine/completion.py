"""Completion: values that an argument of a prompt, or a variable of a template, could have."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from handrail.engine.eager import ThreadPool
from handrail.errors import Kind, Refused, SchemaError
from handrail.jsonrpc import encode
from handrail.model import Object
from handrail.revisions.base import MAX_COUNTED_COMPLETIONS
from handrail.suggest import closest, describe_value, mapping

if TYPE_CHECKING:
    from handrail.engine.catalog import ToolEntry

COMPLETION_SECONDS = 10.0


class Completer(Struct, frozen=True):
    """What completes one argument: a function, or the choices of its type."""

    function: Callable[..., Any]
    takes_context: bool


async def find_values(entry: ToolEntry, params: Any, threads: ThreadPool) -> list[str]:
    """Return the values that the argument of a `completion/complete` could have, the best ones first."""
    completer = entry.complete.get(params.argument.name)
    if completer is None:
        return []
    function, value = completer.function, params.argument.value
    context = getattr(params, "context", None)  # not in every revision
    given = (value, {} if context is None else dict(context.arguments)) if completer.takes_context else (value,)
    try:
        async with asyncio.timeout(COMPLETION_SECONDS):
            if inspect.iscoroutinefunction(function):
                return _texts(await function(*given))
            texts: list[str] = await threads.run(lambda: _texts(function(*given)))
            return texts
    except TimeoutError:
        raise Refused(Kind.TIMEOUT, f"The completion took longer than {COMPLETION_SECONDS:g} s") from None


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
