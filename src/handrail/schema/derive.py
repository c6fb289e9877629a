"""From a Python function: the schema of its arguments, of its result, and how to call it with validated arguments."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from inspect import Parameter
from types import FrameType, FunctionType, MethodType, NoneType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import UNSET, Struct, UnsetType, json

from handrail.errors import SchemaError
from handrail.model import Json, Object
from handrail.schema import models
from handrail.schema.bind import Invoke, Taken, arrives_as_is, converter, invoker, keyword_invoker
from handrail.schema.compile import compile_schema
from handrail.schema.plain import plain
from handrail.schema.types import Field, Types, fields_of, is_record, object_schema, options_of, unwrapped

__all__ = ["Signature", "derive", "form_for", "plain"]

_FORM_TYPES = ("string", "integer", "number", "boolean")
_FORM_FORMATS = ("email", "uri", "date", "date-time")
_UNSTRUCTURED = (str, NoneType, None, Any, object, bytes, Parameter.empty)

_ARGS_SECTION = re.compile(
    r"(?m)^(?P<indent>[ \t]*)(?:Args|Arguments|Parameters):[ \t]*\n(?P<body>(?:(?P=indent)[ \t]+.*\n?|[ \t]*\n)+)"
)
_GOOGLE_ENTRY = re.compile(
    r"(?m)^(?P<indent>[ \t]+)\*{0,2}(?P<name>\w+)[ \t]*(?:\([^)\n]*\))?:[ \t]*(?P<text>.+(?:\n(?P=indent)[ \t]+.+)*)"
)
_SPHINX_ENTRY = re.compile(
    r"(?m)^[ \t]*:param[ \t]+(?:[^:\n]*[ \t])?(?P<name>\w+):[ \t]*(?P<text>.+(?:\n[ \t]+[^:\s].*)*)"
)


class Signature(Struct, frozen=True):
    """What was read from a function. `invoke(arguments, call)` gives what the function returns, awaitable or not.

    Arguments that are valid and yet cannot be bound (a leap second as a datetime) raise `Refused(BAD_ARGUMENTS)`.
    """

    input_schema: Object
    output_schema: Object | UnsetType
    invoke: Invoke
    takes_call: bool


def derive(
    function: Callable[..., Any],
    *,
    call_type: type,
    input_schema: Object | None = None,
    extra: Literal["forbid", "allow"] = "forbid",
) -> Signature:
    """Read a function's signature; SchemaError names the function and the parameter that cannot be used.

    >>> def forecast(city: str, days: int = 3) -> str: ...
    >>> derive(forecast, call_type=Call).input_schema["properties"]["days"]
    {'type': 'integer', 'default': 3}
    """
    where = f"{_name(function)}()"
    hints, names = _hints(function, call_type, where)
    taken = _taken(function, hints, call_type, where)
    if taken.anything_else and input_schema is None and extra != "allow":
        raise SchemaError(f"{where}: **{_rest(function)} needs extra='allow' or an explicit input_schema")
    types = Types(where, names, closed=True)
    pieces = [piece for each in taken.arguments for piece in (each.annotation, each.default)]
    if input_schema is not None:
        schema, invoke = input_schema, _explicit(function, taken, types, input_schema)
    elif models.mentions_pydantic(pieces, names, where):
        schema, bind = models.arguments_model(taken.arguments, where, extra=extra)
        invoke = keyword_invoker(function, taken, bind)
    else:
        members = [
            Field(each.name, each.annotation, each.default is Parameter.empty, _published(each.default))
            for each in taken.arguments
        ]
        schema = types.finished(object_schema(types, members, "", closed=extra == "forbid"))
        invoke = invoker(function, taken, types, is_open=extra == "allow")
    if input_schema is None:
        _describe(schema, inspect.getdoc(function) or "")
    output_schema = _output(hints.get("return", Any), Types(where, names, closed=False))
    return Signature(schema, output_schema, invoke, taken.call is not None)


def form_for(kind: type) -> tuple[Object, Callable[[Object], Any]]:
    """A flat form for elicitation from a record class, and what turns the accepted content into the class."""
    where = f"form {kind.__qualname__}"
    names = _locals_of(kind.__qualname__, kind.__module__)
    if models.mentions_pydantic([kind], names, where):
        schema = models.schema_of(kind, where, mode="validation")
        convert = models.adapter(kind)
        absent: Object = {}
    elif is_record(kind) and not issubclass(kind, tuple):
        types = Types(where, names, closed=False)
        members = fields_of(kind, names, where)
        optional = [field.name for field in members if field.required and NoneType in options_of(field.hint)]
        absent = dict.fromkeys(optional)
        members = [field._replace(required=field.required and field.name not in absent) for field in members]
        schema = types.finished(object_schema(types, members, "", closed=False))
        convert = converter(kind, types, "the form")
    else:
        raise SchemaError(f"{where}: a form is made from a dataclass, a TypedDict, a Struct or a pydantic model")
    definitions = schema.get("$defs", {})
    flat = {
        name: _form_field(inner, definitions, f"{where}: {name}")
        for name, inner in schema.get("properties", {}).items()
    }
    required = {"required": schema["required"]} if "required" in schema else {}
    return {"type": "object", "properties": flat, **required}, lambda content: convert({**absent, **content})


def _form_field(schema: Object, definitions: Object, where: str) -> Object:
    """The field as forms may write it: one primitive, or a choice; null is told by leaving the field out."""
    kept = {key: value for key, value in schema.items() if key not in ("anyOf", "$ref")}
    if kept.get("default", UNSET) is None:
        del kept["default"]
    inner = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    if len(inner) == 1 and "anyOf" in schema:
        return _form_field({**inner[0], **kept}, definitions, where)
    if "$ref" in schema:
        return _form_field({**definitions[schema["$ref"].rpartition("/")[2]], **kept}, {}, where)
    choices = kept.get("items", {}) if kept.get("type") == "array" else kept
    if "$ref" in choices:
        choices = kept["items"] = definitions.get(choices["$ref"].rpartition("/")[2], {})
    is_choice = choices.get("type") == "string" and "enum" in choices
    if not is_choice and (kept.get("type") not in _FORM_TYPES or "enum" in kept):
        raise SchemaError(f"{where}: a form field is text, a number, a boolean, a choice of texts or a list of them")
    if kept.get("format", "email") not in _FORM_FORMATS or "pattern" in kept:
        raise SchemaError(f"{where}: of formats and patterns a form knows only {', '.join(_FORM_FORMATS)}")
    return kept


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


def _plain_function(function: Callable[..., Any]) -> Any:
    """The Python function whose annotations speak for the callable."""
    inner: Any = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    return inner if isinstance(inner, FunctionType | MethodType) else type(inner).__call__


def _hints(function: Callable[..., Any], call_type: type, where: str) -> tuple[Object, Object]:
    """The hints of a function, and the names its surroundings define."""
    inner = _plain_function(function)
    names = _locals_of(getattr(inner, "__qualname__", ""), getattr(inner, "__module__", ""))
    scope = getattr(inner, "__globals__", {})
    if call_type.__name__ not in scope:  # it may be imported for type checkers only
        names.setdefault(call_type.__name__, call_type)
    try:
        return get_type_hints(inner, localns=names, include_extras=True), names
    except NameError as error:
        raise SchemaError(f"{where}: {_culprit(inner, error)}; define it in the function's module") from None
    except (TypeError, SyntaxError, AttributeError) as error:
        raise SchemaError(f"{where}: a type hint cannot be read: {error}") from None


def _culprit(function: Any, error: NameError) -> str:
    for name, hint in getattr(function, "__annotations__", {}).items():
        if isinstance(hint, str) and error.name and re.search(rf"\b{re.escape(error.name)}\b", hint):
            place = "the return hint" if name == "return" else f"the hint of parameter {name!r}"
            return f"{place}, {hint!r}, cannot be resolved: {error}"
    return f"a type hint cannot be resolved: {error}"


def _locals_of(qualname: str, module: str) -> Object:
    """What the functions around a local definition define: string hints may name it and nobody else can tell."""
    around = set(qualname.split(".")) if "<locals>" in qualname else set()
    names: Object = {}
    for frame in _frames() if around else ():
        if frame.f_code.co_name in around and frame.f_globals.get("__name__") == module:
            names = {**frame.f_locals, **names}
    return names


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _taken(function: Callable[..., Any], hints: Object, call_type: type, where: str) -> Taken:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"{where}: it has no signature: {error}") from None
    parameters: list[Parameter] = []
    call: str | None = None
    anything_else = False
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, Parameter.empty)
        if parameter.kind is Parameter.VAR_POSITIONAL:
            raise SchemaError(f"{where}: *{name} cannot be filled from named arguments; take a list instead")
        if parameter.kind is Parameter.VAR_KEYWORD:
            anything_else = True
            continue
        if any(get_origin(option) is call_type or option is call_type for option in options_of(hint)):
            if call is not None:
                raise SchemaError(f"{where}: {call!r} and {name!r} both ask for the {call_type.__name__}; keep one")
            call = name
        parameters.append(parameter.replace(annotation=hint))
    return Taken(parameters, call, anything_else)


def _rest(function: Callable[..., Any]) -> str:
    kinds = inspect.signature(function).parameters.values()
    return next(each.name for each in kinds if each.kind is Parameter.VAR_KEYWORD)


def _published(default: Any) -> Any:
    return UNSET if default is Parameter.empty else default


def _explicit(function: Callable[..., Any], taken: Taken, types: Types, schema: Object) -> Invoke:
    """Binding by name to a schema that somebody wrote: what the hints can take without loss is converted."""
    if type(schema) is not dict or type(schema.get("properties", {})) is not dict:
        raise SchemaError(f"{types.where}: input_schema must be a JSON Schema with 'properties' as a dict")
    properties: Object = schema.get("properties", {})
    required = schema.get("required", [])
    known = {each.name for each in taken.arguments}
    for name in properties:
        if name not in known and not taken.anything_else:
            raise SchemaError(f"{types.where}: input_schema has {name!r}, which the function does not take")
    defaults = {
        name: json.encode(inner["default"])
        for name, inner in properties.items()
        if type(inner) is dict and "default" in inner
    }
    for each in taken.arguments:
        if each.default is Parameter.empty and each.name not in required and each.name not in defaults:
            advice = "require it there, or give it a default"
            raise SchemaError(f"{types.where}: parameter {each.name!r} may be missing under input_schema; {advice}")
    fixes = {each.name: fix for each in taken.arguments if (fix := _lossless(each, types)) is not None}

    def bind(arguments: Object) -> Object:
        bound = dict(arguments)
        for name, default in defaults.items():
            if name not in bound:
                bound[name] = json.decode(default)  # a fresh one each time: the function may change it
        for name, fix in fixes.items():
            if name in bound:
                bound[name] = fix(bound[name])
        return bound

    return keyword_invoker(function, taken, bind)


def _lossless(parameter: Parameter, types: Types) -> Callable[[Json], Any] | None:
    hint = parameter.annotation
    if arrives_as_is(hint):
        return None
    at = f"parameter {parameter.name!r}"
    alone = Types(types.where, types.names, closed=True)
    try:
        if models.mentions_pydantic([hint], types.names, types.where):
            convert, schema = models.adapter(hint), models.schema_of(hint, types.where, mode="validation")
        else:
            schema, convert = alone.finished(alone.schema(hint, at)), converter(hint, alone, at)
        valid = compile_schema(schema, f"{types.where}: {at}", any_root=True).valid
    except SchemaError:
        return None  # a hint JSON cannot express: the value goes as it came
    return lambda value: convert(value) if valid(value) else value


def _output(hint: Any, types: Types) -> Object | UnsetType:
    """The schema of a result that says more than "text"; UNSET otherwise."""
    if not _is_structured(hint):
        return UNSET
    if models.mentions_pydantic([hint], types.names, types.where):
        return models.schema_of(hint, types.where, mode="serialization")
    try:
        return types.finished(types.schema(hint, "the result"))
    except SchemaError:
        return UNSET


def _is_structured(hint: Any) -> bool:
    options = options_of(hint)
    if any(_is_content(option) for option in options):
        return False
    return any(unwrapped(option) not in _UNSTRUCTURED for option in options)


def _is_content(hint: Any) -> bool:
    hint = unwrapped(hint)
    inside = get_args(hint) if get_origin(hint) in (list, tuple, Union) else ()
    if any(_is_content(option) for each in inside for option in options_of(each)):
        return True
    return isinstance(hint, type) and hint.__module__ == "handrail.model"


def _describe(schema: Object, text: str) -> None:
    """Descriptions of parameters from the docstring, where the hint has none."""
    found: dict[str, str] = {}
    for section in _ARGS_SECTION.finditer(text):
        entries = list(_GOOGLE_ENTRY.finditer(section["body"]))
        found.update({each["name"]: each["text"] for each in entries if each["indent"] == entries[0]["indent"]})
    found.update({each["name"]: each["text"] for each in _SPHINX_ENTRY.finditer(text)})
    for name, inner in schema.get("properties", {}).items():
        if name in found and "description" not in inner:
            inner["description"] = " ".join(found[name].split())
