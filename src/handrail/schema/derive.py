"""From a Python function: the schema of its arguments, of its result, and how to call it with validated arguments.

Arguments have always been validated against the published schema before. Binding only converts: `1.0` for an `int`,
text for a `datetime`, an object for a dataclass.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from inspect import Parameter
from pathlib import PurePath
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from msgspec import UNSET, Struct, UnsetType, ValidationError, convert, defstruct, field, json, structs

from handrail.errors import Kind, Refused, SchemaError
from handrail.model import Json, Object
from handrail.schema import models
from handrail.schema.plain import plain as plain
from handrail.schema.types import Field, Types, fields_of, is_record, options_of

Invoke = Callable[[Object, Any], Any]

_AS_IS = (str, bool, NoneType, Any, dict, list, Parameter.empty)
_UNSTRUCTURED = (str, NoneType, Any, object, bytes, Parameter.empty)
_FORM_TYPES = ("string", "integer", "number", "boolean")
_FORM_FORMATS = ("email", "uri", "date", "date-time")
_PLACE = re.compile(r"(?s)(.*) - at `\$\.?(.+)`")
_ARGS_SECTION = re.compile(r"(?m)^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+.*\n?|[ \t]*\n)+)")
_ARGS_ENTRY = re.compile(r"(?m)^(?P<indent> +)\*{0,2}(\w+)[ \t]*(?:\([^)\n]*\))?:[ \t]*(.+(?:\n(?P=indent)[ \t]+.+)*)")
_PARAM_ENTRY = re.compile(r"(?m)^()[ \t]*:param[ \t]+(?:[^:\n]*[ \t])?(\w+):[ \t]*(.+(?:\n[ \t]+[^:\s].*)*)")


class Signature(Struct, frozen=True):
    """What was read from a function. `invoke(arguments, call)` gives what the function returns, awaitable or not.

    Arguments that are valid and yet cannot be bound (a leap second as a datetime) raise `Refused(BAD_ARGUMENTS)`.
    """

    input_schema: Object
    output_schema: Object | UnsetType
    invoke: Invoke
    takes_call: bool


class _Taken(NamedTuple):
    """What a function takes: its parameters with resolved hints, the name of the one for the call, its **rest."""

    parameters: list[Parameter]
    call: str | None
    rest: str | None

    @property
    def arguments(self) -> list[Parameter]:
        return [each for each in self.parameters if each.name != self.call]


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
    where = f"{getattr(function, '__name__', type(function).__name__)}()"
    hints, names = _hints(function, call_type, where)
    taken = _taken(function, hints, call_type, where)
    types = Types(where, names, closed=True)
    pieces = [piece for each in taken.arguments for piece in (each.annotation, each.default)]
    if input_schema is not None:
        schema, invoke = input_schema, _by_name(function, taken, _explicit(taken, types, input_schema))
    elif taken.rest and extra != "allow":
        raise SchemaError(f"{where}: **{taken.rest} needs extra='allow' or an explicit input_schema")
    elif models.mentions_pydantic(pieces, names, where):
        schema, bind = models.arguments_model(taken.arguments, where, extra=extra)
        invoke = _by_name(function, taken, bind)
    else:
        members = [Field(each.name, each.annotation, each.default) for each in taken.arguments]
        schema = types.finished(types.object_schema(members, "", closed=extra == "forbid"))
        invoke = _invoker(function, taken, types, is_open=extra == "allow")
    if input_schema is None:
        _describe(schema, inspect.getdoc(function) or "")
    output_schema = _output(hints.get("return", Any), Types(where, names, closed=False))
    return Signature(schema, output_schema, invoke, taken.call is not None)


def form_for(kind: type) -> tuple[Object, Callable[[Object], Any]]:
    """A flat form for elicitation from a record class, and what turns the accepted content into the class."""
    where = f"form {kind.__qualname__}"
    names = _surroundings(kind.__qualname__, vars(sys.modules[kind.__module__]))
    absent: Object = {}
    if models.mentions_pydantic([kind], names, where):
        schema, accept = models.schema_of(kind, where, mode="validation"), models.adapter(kind)
    elif is_record(kind) and not issubclass(kind, tuple):
        types = Types(where, names, closed=False)
        members = fields_of(kind, names, where)
        absent = {each.name: None for each in members if each.required and NoneType in options_of(each.hint)}
        members = [each._replace(default=None) if each.name in absent else each for each in members]
        schema = types.finished(types.object_schema(members, "", closed=False))
        accept = partial(_converted, kind=_bindable(kind, types, "the form"))
    else:
        raise SchemaError(f"{where}: a form is made from a dataclass, a TypedDict, a Struct or a pydantic model")
    definitions = schema.pop("$defs", {})
    for name, inner in schema.setdefault("properties", {}).items():
        schema["properties"][name] = _form_field(inner, definitions, f"{where}: {name}")
    form: Object = {key: schema[key] for key in ("type", "properties", "required") if key in schema}
    return form, lambda content: accept({**absent, **content})


def _form_field(schema: Object, definitions: Object, where: str) -> Object:
    """The field as forms may write it: one primitive, or a choice; null is told by leaving the field out."""
    kept = {key: value for key, value in schema.items() if key not in ("anyOf", "$ref") and value is not None}
    inner = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    if "$ref" in schema:
        inner = [definitions[schema["$ref"].rpartition("/")[2]]]
    if len(inner) == 1:
        return _form_field({**inner[0], **kept}, definitions, where)
    if "$ref" in kept.get("items", {}):
        kept["items"] = definitions[kept["items"]["$ref"].rpartition("/")[2]]
    choice = kept.get("items", kept)
    is_choice = choice.get("type") == "string" and "enum" in choice
    if not is_choice and (kept.get("type") not in _FORM_TYPES or "enum" in kept):
        raise SchemaError(f"{where}: a form field is text, a number, a boolean, a choice of texts or a list of them")
    if kept.get("format", "email") not in _FORM_FORMATS or "pattern" in kept:
        raise SchemaError(f"{where}: of formats and patterns a form knows only {', '.join(_FORM_FORMATS)}")
    return kept


def _hints(function: Callable[..., Any], call_type: type, where: str) -> tuple[Object, Object]:
    """The hints of a function, and the names its surroundings define."""
    inner: Any = inspect.unwrap(function)
    if not hasattr(inner, "__globals__"):
        raise SchemaError(f"{where}: not a function or a method of a class; write one around it")
    scope = inner.__globals__
    names = _surroundings(inner.__qualname__, scope)
    if call_type.__name__ not in scope:  # it may be imported for type checkers only
        names.setdefault(call_type.__name__, call_type)
    try:
        return get_type_hints(inner, localns=names, include_extras=True), names
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise SchemaError(f"{where}: a type hint cannot be resolved: {error}; define it in the module") from None


def _surroundings(qualname: str, scope: Object) -> Object:
    """What the functions around a local definition define: string hints may name it and nobody else can tell."""
    names: Object = {}
    frame = inspect.currentframe() if "<locals>" in qualname else None
    while frame is not None:
        if frame.f_globals is scope:
            names = {**frame.f_locals, **names}
        frame = frame.f_back
    return names


def _taken(function: Callable[..., Any], hints: Object, call_type: type, where: str) -> _Taken:
    taken = _Taken([], None, None)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, Parameter.empty)
        if parameter.kind is Parameter.VAR_POSITIONAL:
            raise SchemaError(f"{where}: *{name} cannot be filled from named arguments; take a list instead")
        if parameter.kind is Parameter.VAR_KEYWORD:
            taken = taken._replace(rest=name)
            continue
        if call_type in [get_origin(option) or option for option in options_of(hint)]:
            if taken.call is not None:
                raise SchemaError(f"{where}: {taken.call!r} and {name!r} both ask for the {call_type.__name__}")
            taken = taken._replace(call=name)
        taken.parameters.append(parameter.replace(annotation=hint))
    return taken


def _by_name(function: Callable[..., Any], taken: _Taken, bind: Callable[[Object], Object]) -> Invoke:
    """Binds by `bind`, which gives the arguments by name; absent ones keep the function's own defaults."""
    only = [each for each in taken.parameters if each.kind is Parameter.POSITIONAL_ONLY]
    names = {each.name for each in taken.parameters}

    def invoke(arguments: Object, call: Any) -> Any:
        bound = {name: value for name, value in bind(arguments).items() if taken.rest or name in names}
        if taken.call is not None:
            bound[taken.call] = call
        return function(*[bound.pop(each.name, each.default) for each in only], **bound)

    return invoke


def _invoker(function: Callable[..., Any], taken: _Taken, types: Types, *, is_open: bool) -> Invoke:
    """Binds by the hints. `is_open`: arguments the function does not know may come, and are left out."""
    arguments = taken.arguments
    kinds = [each.kind for each in taken.parameters]
    call_is_first = taken.call is not None and taken.parameters[0].name == taken.call
    as_is = all(each.annotation in _AS_IS for each in arguments) and Parameter.POSITIONAL_ONLY not in kinds
    if as_is and taken.call is None and is_open == bool(taken.rest):
        return lambda arguments, call: function(**arguments)
    if as_is and call_is_first and not is_open and Parameter.KEYWORD_ONLY not in kinds[:1]:
        return lambda arguments, call: function(call, **arguments)
    names = {f"p{i}": each.name for i, each in enumerate(arguments)}
    fields: list[Any] = []
    for name, each in zip(names, arguments, strict=True):
        kind = _bindable(each.annotation, types, f"parameter {each.name!r}")
        default = [] if each.default is Parameter.empty else [field(default_factory=partial(_given, each.default))]
        fields.append((name, kind, *default))
    shape = defstruct("Arguments", fields, rename=names, kw_only=True, gc=False)
    options: Object = {"dec_hook": _hook, "str_keys": True} if types.special else {}
    values = structs.astuple

    def by_position(arguments: Object, call: Any) -> Any:
        try:
            bound = convert(arguments, shape, **options)
        except ValidationError:
            bound = _converted(arguments, shape)
        return function(call, *values(bound)) if call_is_first else function(*values(bound))

    def by_name(arguments: Object) -> Object:
        bound = dict(zip(names.values(), values(_converted(arguments, shape)), strict=True))
        return {**arguments, **bound} if taken.rest else bound

    if (call_is_first or taken.call is None) and not taken.rest and Parameter.KEYWORD_ONLY not in kinds:
        return by_position
    return _by_name(function, taken, by_name)


def _explicit(taken: _Taken, types: Types, schema: Object) -> Callable[[Object], Object]:
    """Binding to a schema that somebody wrote: what the hints can take is converted, the rest arrives as it came."""
    if type(schema) is not dict or type(schema.get("properties", {})) is not dict:
        raise SchemaError(f"{types.where}: input_schema must be a JSON Schema with 'properties' as a dict")
    properties: Object = schema.get("properties", {})
    known = {each.name for each in taken.arguments}
    for name in properties:
        if name not in known and not taken.rest:
            raise SchemaError(f"{types.where}: input_schema has {name!r}, which the function does not take")
    defaults = {
        name: json.encode(inner["default"])
        for name, inner in properties.items()
        if type(inner) is dict and "default" in inner
    }
    converters: dict[str, Callable[[Json], Any]] = {}
    for each in taken.arguments:
        if each.default is Parameter.empty and each.name not in (*schema.get("required", ()), *defaults):
            raise SchemaError(f"{types.where}: parameter {each.name!r} may be missing under input_schema: require it")
        try:
            if models.mentions_pydantic([each.annotation], types.names, types.where):
                converters[each.name] = models.adapter(each.annotation)
            elif types.schema(each.annotation, each.name):
                converters[each.name] = partial(_converted, kind=_bindable(each.annotation, types, each.name))
        except SchemaError:
            continue

    def bind(arguments: Object) -> Object:
        # A default is made each time: the function may change it.
        bound = {name: json.decode(default) for name, default in defaults.items() if name not in arguments} | arguments
        for name in bound.keys() & converters.keys():
            try:
                bound[name] = converters[name](bound[name])
            except Refused:
                continue
        return bound

    return bind


def _bindable(hint: Any, types: Types, at: str) -> Any:
    """The hint as msgspec takes it; SchemaError where it cannot."""
    if get_origin(hint) is Annotated:  # bounds are checked already, and around a whole union unknown to msgspec
        return _bindable(get_args(hint)[0], types, at)
    kind = Any if hint is Parameter.empty else hint
    try:
        json.Decoder(kind)
    except (TypeError, NameError) as error:
        advice = "use tagged Structs, pydantic models, or an explicit schema and plain types"
        raise SchemaError(f"{types.where}: {at} cannot be bound: {error}; {advice}") from None
    return kind


def _converted(value: Json, kind: Any) -> Any:
    try:
        return convert(value, kind, dec_hook=_hook, str_keys=True)
    except ValidationError:
        pass
    try:
        # JSON Schema calls 1.0 an integer; msgspec does not.
        return convert(_integral(value), kind, dec_hook=_hook, str_keys=True)
    except ValidationError as error:
        found = _PLACE.fullmatch(str(error))
        raise Refused(Kind.BAD_ARGUMENTS, f"{found[2]}: {found[1]}" if found else str(error)) from None


def _given(default: Any) -> Any:
    return default


def _integral(value: Json) -> Json:
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is dict:
        return {name: _integral(inner) for name, inner in value.items()}
    return [_integral(inner) for inner in value] if type(value) is list else value


def _hook(kind: type, value: Json) -> Any:
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    if kind is object:
        return value
    raise ValueError(f"Expected {kind.__name__}")


def _output(hint: Any, types: Types) -> Object | UnsetType:
    """The schema of a result that says more than "text"; UNSET otherwise."""
    options = options_of(hint)
    if any(map(_is_content, options)) or all(option in _UNSTRUCTURED for option in options):
        return UNSET
    if models.mentions_pydantic([hint], types.names, types.where):
        return models.schema_of(hint, types.where, mode="serialization")
    try:
        return types.finished(types.schema(hint, "the result"))
    except SchemaError:
        return UNSET


def _is_content(hint: Any) -> bool:
    inside = get_args(hint) if get_origin(hint) in (list, tuple) else ()
    if any(_is_content(option) for each in inside for option in options_of(each)):
        return True
    return isinstance(hint, type) and hint.__module__ == "handrail.model"


def _describe(schema: Object, text: str) -> None:
    """Descriptions of parameters from the docstring, where the hint has none."""
    found = _PARAM_ENTRY.findall(text)
    for section in _ARGS_SECTION.findall(text):
        entries = _ARGS_ENTRY.findall(section)
        found += [each for each in entries if each[0] == entries[0][0]]
    for _, name, description in found:
        inner = schema.get("properties", {}).get(name)
        if inner is not None and "description" not in inner:
            inner["description"] = " ".join(description.split())
