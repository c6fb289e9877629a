"""Previews: the tool author's description of what a call would do, for the person who decides about it."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable
from copy import copy, deepcopy
from functools import wraps
from typing import Any, Literal

from handrail.engine.call import Call
from handrail.engine.call_state import CallState
from handrail.engine.catalog import Preview
from handrail.engine.eager import ThreadPool
from handrail.errors import Refused, SchemaError, ToolError
from handrail.model import Object
from handrail.schema.derive import derive
from handrail.schema.jsonable import to_jsonable
from handrail.suggest import closest
from handrail.text.controls import escape

__all__ = ["make_preview", "run_preview"]

log = logging.getLogger("handrail")

TIMEOUT_SECONDS = 5.0
MAX_CHARACTERS = 2_000
MAX_CLEANED_CHARACTERS = 50_000  # sanitized before the text is cut, so that no secret shows by being cut in two


def make_preview(
    preview: Any,
    tool: Callable[..., Any],
    where: str,
    *,
    input_schema: Object | None = None,
    extra: Literal["forbid", "allow"] = "forbid",
) -> Preview:
    """Check that the function can be called with the tool's arguments; SchemaError names the parameter that cannot."""
    if not callable(preview):
        kind = type(preview).__name__
        raise SchemaError(f"{where}: preview: expected a function that takes the tool's arguments, got {kind}")
    signature = inspect.signature(tool)

    @wraps(tool)
    def arguments(*args: Any, **kwargs: Any) -> Object:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        rest = [bound.arguments.pop(name) for name in [*bound.arguments] if signature.parameters[name].kind is _REST]
        return {**bound.arguments, **(rest[0] if rest else {})}

    bind = derive(arguments, call_type=Call, input_schema=input_schema, extra=extra).invoke
    is_open = any(each.kind is _REST for each in signature.parameters.values())
    names: list[str] = []
    call = ""
    for name, parameter in inspect.signature(preview).parameters.items():
        if parameter.kind is _REST:
            names += signature.parameters
        elif parameter.annotation is Call or str(parameter.annotation).rpartition(".")[2] == Call.__name__:
            call = name
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise SchemaError(f"{where}: preview: {parameter}: arguments come by name")
        elif name in signature.parameters or is_open:
            names.append(name)
        elif parameter.default is parameter.empty:
            near = closest(name, signature.parameters)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(signature.parameters) or 'none'}"
            raise SchemaError(f"{where}: preview: parameter {name!r} is not an argument of the tool; {hint}")
    return Preview(preview, bind, frozenset(names), call)


_REST = inspect.Parameter.VAR_KEYWORD


async def run_preview(preview: Preview, call: CallState, thread_pool: ThreadPool, clean: Callable[[str], str]) -> str:
    """Return what the call would do: bounded, sanitized and escaped. A failed preview returns a text that says so."""
    # A preview must not act: nothing that it sends reaches the client.
    state = copy(call)
    state.is_preview, state.closed, state.activity = True, True, None
    state.arguments = deepcopy(call.arguments)
    preview_call = Call(state)
    timeout = asyncio.timeout(TIMEOUT_SECONDS)
    try:
        async with timeout:
            if inspect.iscoroutinefunction(preview.function):
                value = await preview.invoke(preview_call)
            else:
                value = await thread_pool.run(preview.invoke, preview_call)
                if inspect.isawaitable(value):
                    value = await value
        if value is None:
            return ""
        text = value if isinstance(value, str) else json.dumps(to_jsonable(value), indent=2, ensure_ascii=False)
    except (ToolError, Refused) as problem:
        text = f"preview failed: {problem.text}"
    except BaseException as problem:  # any error fails only the preview
        task = asyncio.current_task()
        if isinstance(problem, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        if timeout.expired():
            text = f"preview failed: no answer within {TIMEOUT_SECONDS:g} s"
        else:  # the text of an exception may hold anything: it goes only into the log
            log.exception("tool %r: its preview failed", call.name)
            text = f"preview failed: {type(problem).__name__}"
    text = str.__str__(text).strip()
    safe_text = escape(clean(text[:MAX_CLEANED_CHARACTERS]).strip())
    if len(safe_text) > MAX_CHARACTERS:
        return safe_text[: MAX_CHARACTERS - 1] + "…"
    # So much of the text was masked that its end may be half a secret.
    return (
        safe_text
        if len(text) <= MAX_CLEANED_CHARACTERS
        else f"preview failed: over {MAX_CLEANED_CHARACTERS:,} characters, of which most are hidden"
    )
