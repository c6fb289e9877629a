"""From a Python function: the schema of its arguments, of its result, and how to call it with validated arguments.

Arguments have always been validated against the published schema before. Binding only converts: `1.0` for an `int`,
text for a `datetime`, an object for a dataclass.

Docstrings: what they say of each parameter, in the forms of Google, NumPy and Sphinx, and the prose around that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from functools import lru_cache, partial
from inspect import Parameter
from itertools import repeat
from pathlib import PurePath
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from msgspec import UNSET, Struct, UnsetType, ValidationError, convert, defstruct, field, json, structs

from handrail.errors import Kind, Refused, SchemaError
from handrail.model import Json, Object
from handrail.schema import pydantic_models as models
from handrail.schema.types import Field, Types, is_record, options_of
from handrail.suggest import describe_value

Invoke = Callable[[Object, Any], Any]

_AS_IS = (str, bool, NoneType, Any, dict, list, Parameter.empty)
_UNSTRUCTURED = (str, NoneType, Any, object, bytes, Parameter.empty)
_NULL = {"type": "null"}
_FORM_TYPES = ("string", "integer", "number", "boolean")
_FORM_FORMATS = ("email", "uri", "date", "date-time")
_PLACE = re.compile(r"(?s)(.*) - at `\$\.?(.+)`")


class Signature(Struct, frozen=True):
    """What was read from a function. `invoke(arguments, call)` gives what the function returns, awaitable or not.

    Arguments that are valid and yet cannot be bound (a leap second as a datetime) raise `Refused(BAD_ARGUMENTS)`.
    """

    input_schema: Object
    output_schema: Object | UnsetType
    invoke: Invoke
    description: str = ""  # the docstring, without what it says of single parameters
    takes_call: bool = False


class _Parameters(NamedTuple):
    """What a function takes: arguments with resolved hints, and the names of its parameter for the call and **rest."""

    arguments: list[Parameter]
    call: str | None = None
    call_is_first: bool = False
    rest: str | None = None


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
    _refuse_unbound(function, where)
    hints = _hints(function, call_type, where)
    parameters = _read_parameters(function, hints, call_type, where)
    if input_schema is None:
        for each in parameters.arguments:
            if each.annotation is Parameter.empty:
                meant = f"write {each.name}: str, or {each.name}: Any for any value"
                raise SchemaError(f"{where}: parameter {each.name!r} has no type hint; {meant}")
    prose, described = split_docstring(inspect.getdoc(function) or "", {each.name for each in parameters.arguments})
    pieces = [piece for each in parameters.arguments for piece in (each.annotation, each.default)]
    if input_schema is not None:
        schema, invoke = (
            input_schema,
            _bind_by_name(function, parameters, _defaults_binder(parameters, input_schema, where)),
        )
    elif parameters.rest and extra != "allow":
        raise SchemaError(f"{where}: **{parameters.rest} needs extra='allow' or an explicit input_schema")
    elif models.mentions_pydantic(pieces, where):
        schema, bind = models.arguments_model(parameters.arguments, where, extra=extra)
        invoke = _bind_by_name(function, parameters, bind)
    else:
        types = Types(where, closed=True)
        members = [Field(each.name, each.annotation, each.default) for each in parameters.arguments]
        schema = types.with_definitions(types.object_schema(members, "", closed=extra == "forbid"))
        invoke = _bind_by_hints(function, parameters, types, is_open=extra == "allow")
    if input_schema is None:
        notes = {each.name: getattr(each.annotation, "__metadata__", ()) for each in parameters.arguments}
        # `Annotated[str, "…"]` says it too, which pydantic does not read.
        described |= {name: note for name, them in notes.items() for note in them if isinstance(note, str)}
        for name in described.keys() & schema.get("properties", {}).keys():
            schema["properties"][name].setdefault("description", described[name])
    return Signature(
        schema, _output(hints.get("return", Any), Types(where, closed=False)), invoke, prose, bool(parameters.call)
    )


def form_for(kind: type) -> tuple[Object, Callable[[Object], Any]]:
    """A flat form for elicitation from a record class, and what turns the accepted content into the class."""
    where = f"form {kind.__qualname__}"
    if models.mentions_pydantic([kind], where):
        schema, accept = models.pydantic_schema(kind, where)
    elif is_record(kind):
        types = Types(where, closed=False)
        schema = types.with_definitions(types.schema(kind, "form"))
        accept = partial(_convert, kind=_bindable(kind, f"{where}: the form"))
    else:
        raise SchemaError(f"{where}: a form is made from a dataclass, a TypedDict, a Struct or a pydantic model")
    properties, definitions = schema.get("properties", {}), schema.get("$defs", {})
    # A field is left out to say null, also where the class wants to be told.
    absent = {name: None for name in schema.get("required", ()) if _NULL in properties[name].get("anyOf", ())}
    required = [name for name in schema.get("required", ()) if name not in absent]
    fields = {name: _form_field(inner, definitions, f"{where}: {name}") for name, inner in properties.items()}
    form: Object = {"type": "object", "properties": fields, **({"required": required} if required else {})}
    return form, lambda content: accept({**absent, **content})


def reader_for(kind: Any) -> Callable[[Json], Any]:
    """Return what turns JSON values into a type; it raises `Refused` with the place and the problem."""
    try:
        return _reader(kind)
    except TypeError:  # one that cannot be a key, such as an Annotated with a list in it
        return _reader.__wrapped__(kind)


@lru_cache(256)
def _reader(kind: Any) -> Callable[[Json], Any]:
    where = str(getattr(kind, "__qualname__", kind))
    if models.mentions_pydantic([kind], where):
        return models.pydantic_schema(kind, where)[1]
    return partial(_convert, kind=_bindable(kind, where))


def _form_field(schema: Object, definitions: Object, where: str) -> Object:
    """The field as forms may write it: one primitive, or a choice."""
    keywords = {key: value for key, value in schema.items() if key not in ("anyOf", "$ref") and value is not None}
    inner = [each for each in schema.get("anyOf", ()) if each != _NULL]
    if "$ref" in schema:
        inner = [definitions[schema["$ref"].removeprefix("#/$defs/")]]
    if len(inner) == 1:
        return _form_field({**inner[0], **keywords}, definitions, where)
    if "$ref" in keywords.get("items", {}):
        keywords["items"] = definitions[keywords["items"]["$ref"].removeprefix("#/$defs/")]
    choice = keywords.get("items", keywords)
    is_choice = choice.get("type") == "string" and "enum" in choice
    if not is_choice and (keywords.get("type") not in _FORM_TYPES or "enum" in keywords):
        raise SchemaError(f"{where}: a form field is text, a number, a boolean, a choice of texts or a list of them")
    if keywords.get("format", "email") not in _FORM_FORMATS or "pattern" in keywords:
        raise SchemaError(f"{where}: of formats and patterns a form knows only {', '.join(_FORM_FORMATS)}")
    return keywords


def _refuse_unbound(function: Any, where: str) -> None:
    """A method in the body of its class has no object yet: `self` would become an argument."""
    within, _, name = getattr(function, "__qualname__", "").rpartition(".")
    if inspect.isfunction(function) and within and not within.endswith("<locals>"):
        first = next(iter(inspect.signature(function).parameters), "")
        if first in ("self", "cls"):
            kind = within.rpartition(".")[2]
            thing = kind.lower() if first == "self" else kind
            construction = f"{thing} = {kind}(…), then " if first == "self" else ""
            raise SchemaError(
                f"{where}: a method of a class, without its object: {construction}server.add({thing}.{name})"
            )


def _hints(function: Callable[..., Any], call_type: type, where: str) -> Object:
    inner: Any = inspect.unwrap(function)
    if not hasattr(inner, "__globals__"):
        raise SchemaError(f"{where}: not a function or a method of a class; write one around it")
    scope, names = inner.__globals__, {}
    if call_type.__name__ not in scope:  # it may be imported for type checkers only
        names[call_type.__name__] = call_type
    # String hints may name what the functions around a local one define, and no other module can tell.
    frame = inspect.currentframe() if "<locals>" in inner.__qualname__ else None
    while frame is not None:
        names = {**frame.f_locals, **names} if frame.f_globals is scope else names
        frame = frame.f_back
    try:
        return get_type_hints(inner, localns=names, include_extras=True)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise SchemaError(f"{where}: a type hint cannot be resolved: {error}; define it in the module") from None


def _read_parameters(function: Callable[..., Any], hints: Object, call_type: type, where: str) -> _Parameters:
    parameters = _Parameters([])
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, Parameter.empty)
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY):
            raise SchemaError(f"{where}: {parameter}: arguments come by name; take a list, or leave the '/' out")
        if parameter.kind is Parameter.VAR_KEYWORD:
            parameters = parameters._replace(rest=name)
        elif call_type not in [get_origin(option) or option for option in options_of(hint)]:
            parameters.arguments.append(parameter.replace(annotation=hint))
        elif parameters.call is None:
            is_first = not parameters.arguments and parameter.kind is not Parameter.KEYWORD_ONLY
            parameters = parameters._replace(call=name, call_is_first=is_first)
        else:
            raise SchemaError(f"{where}: {parameters.call!r} and {name!r} both ask for the {call_type.__name__}")
    return parameters


def _defaults_binder(parameters: _Parameters, schema: Object, where: str) -> Callable[[Object], Object]:
    """Under a hand-written schema arguments stay as they come, absent ones as its defaults say.

    Refuses a schema that lets through what the function cannot be called with.
    """
    if type(schema) is not dict or type(properties := schema.get("properties", {})) is not dict:
        actual = "properties that are none" if type(schema) is dict else describe_value(schema)
        raise SchemaError(f"{where}: input_schema: expected a JSON Schema as a dict, with 'properties', got {actual}")
    names = {each.name for each in parameters.arguments}
    for name in properties:
        if name not in names and not parameters.rest:
            raise SchemaError(f"{where}: input_schema has {name!r}, which the function does not take")
    defaults = {name: each["default"] for name, each in properties.items() if type(each) is dict and "default" in each}
    for each in parameters.arguments:
        if each.default is Parameter.empty and each.name not in (*schema.get("required", ()), *defaults):
            raise SchemaError(f"{where}: parameter {each.name!r} may be missing under input_schema: require it")
    whole = json.encode(defaults)
    # Made anew for each call: the function may change what it gets.
    return lambda arguments: {**json.decode(whole), **arguments} if defaults else arguments


def _bind_by_name(function: Callable[..., Any], parameters: _Parameters, bind: Callable[[Object], Object]) -> Invoke:
    """Calls with what `bind` gives by name; absent arguments keep the function's own defaults."""
    names = {each.name for each in parameters.arguments}

    def invoke(arguments: Object, call: Any) -> Any:
        bound = {name: value for name, value in bind(arguments).items() if parameters.rest or name in names}
        if parameters.call is not None:
            bound[parameters.call] = call
        return function(**bound)

    return invoke


def _bind_by_hints(function: Callable[..., Any], parameters: _Parameters, types: Types, *, is_open: bool) -> Invoke:
    """Binds by the hints. `is_open`: arguments the function does not know may come, and are left out."""
    call_is_first = parameters.call_is_first
    as_is = all(each.annotation in _AS_IS for each in parameters.arguments)
    if as_is and parameters.call is None and is_open == bool(parameters.rest):
        return lambda arguments, call: function(**arguments)
    if as_is and call_is_first and not is_open:
        return lambda arguments, call: function(call, **arguments)
    fields: list[Any] = []
    for each in parameters.arguments:
        # Not `default=`, which would copy it: the function gets its own object.
        default = [] if each.default is Parameter.empty else [field(default_factory=repeat(each.default).__next__)]
        fields.append((each.name, _bindable(each.annotation, f"{types.where}: parameter {each.name!r}"), *default))
    shape = defstruct("Arguments", fields, kw_only=True, gc=False)
    by_keyword = any(each.kind is Parameter.KEYWORD_ONLY for each in parameters.arguments)
    if by_keyword or parameters.rest or not (call_is_first or parameters.call is None):
        return _bind_by_name(
            function,
            parameters,
            lambda raw_arguments: {**raw_arguments, **structs.asdict(_convert(raw_arguments, shape))},
        )
    values = structs.astuple
    # Merely to have a hook takes three times as long.
    read = partial(convert, type=shape, dec_hook=_hook) if types.has_paths else partial(convert, type=shape)

    def by_position(arguments: Object, call: Any) -> Any:
        try:
            bound = read(arguments)
        except ValidationError:
            bound = _convert(arguments, shape)
        return function(call, *values(bound)) if call_is_first else function(*values(bound))

    return by_position


def _bindable(hint: Any, where: str) -> Any:
    """The hint as msgspec takes it; SchemaError where it cannot."""
    # Bounds are checked already, and around a whole union msgspec does not know them.
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else Any if hint is Parameter.empty else hint
    try:
        json.Decoder(kind)
    except (TypeError, NameError) as error:
        advice = "use tagged Structs, pydantic models, or an explicit schema and plain types"
        raise SchemaError(f"{where} cannot be bound: {error}; {advice}") from None
    return kind


def _convert(value: Json, kind: Any) -> Any:
    try:
        return convert(value, kind, dec_hook=_hook)
    except ValidationError:
        pass
    try:
        # JSON Schema calls 1.0 an integer; msgspec does not.
        return convert(_integral(value), kind, dec_hook=_hook)
    except ValidationError as error:
        match = _PLACE.fullmatch(str(error))
        raise Refused(Kind.BAD_ARGUMENTS, f"{match[2]}: {match[1]}" if match else str(error)) from None


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
    if models.mentions_pydantic([hint], types.where):
        return models.pydantic_schema(hint, types.where, mode="serialization")[0]
    try:
        return types.with_definitions(types.schema(hint, "the result"))
    except SchemaError:
        return UNSET


def _is_content(hint: Any) -> bool:
    inside = get_args(hint) if get_origin(hint) in (list, tuple) else ()
    if any(_is_content(option) for each in inside for option in options_of(each)):
        return True
    return isinstance(hint, type) and hint.__module__ == "handrail.model"


_GOOGLE = re.compile(r"(?:Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments|Other Parameters):\s*")
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\((?:[^()]|\([^()]*\))*\))?\s*:\s*(.*)")
_NUMPY = re.compile(r"(?:Other )?Parameters\s*")
_NUMPY_ENTRY = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?")
_SPHINX_ENTRY = re.compile(r":(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)")
_SPHINX_TYPE = re.compile(r":(?:type|vartype)\s+\w+\s*:.*")


def split_docstring(docstring: str, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """Return the prose of a clean docstring, and the descriptions of the parameters it names.

    A section that names none of them is left where it is.
    """
    lines = docstring.splitlines()
    prose: list[str] = []
    described: dict[str, str] = {}
    at = 0
    while at < len(lines):
        end, entries = _docstring_section(lines, at, names)
        descriptions = {
            name: _joined_lines(text) for name, text in entries.items() if name in names and _joined_lines(text)
        }
        if end > at and (descriptions or any(name in names for name in entries)):
            described |= {name: text for name, text in descriptions.items() if name not in described}
            at = end
        else:
            prose.append(lines[at])
            at += 1
    return re.sub(r"\n{3,}", "\n\n", "\n".join(prose)).strip(), described


def _docstring_section(lines: list[str], at: int, parameters: Collection[str]) -> tuple[int, dict[str, list[str]]]:
    """Return where the section of parameters that begins here ends, and the lines of each; `at` if none begins."""
    line, after = lines[at], lines[at + 1] if at + 1 < len(lines) else ""
    if _GOOGLE.fullmatch(line):
        return _google(lines, at + 1)
    if _NUMPY.fullmatch(line) and re.fullmatch(r"-{3,}\s*", after):
        return _numpy(lines, at + 2, parameters)
    if entry := _SPHINX_ENTRY.fullmatch(line):
        end = _indented_lines(lines, at + 1)
        while end < len(lines) and _SPHINX_TYPE.fullmatch(lines[end]):
            end = _indented_lines(lines, end + 1)
        continuation = [each for each in lines[at + 1 : end] if not _SPHINX_TYPE.fullmatch(each)]
        return end, {entry[1]: [entry[2], *continuation]}
    return at, {}


def _google(lines: list[str], begin: int) -> tuple[int, dict[str, list[str]]]:
    end, entries, margin, name = _indented_lines(lines, begin, over_blanks=True), dict[str, list[str]](), -1, ""
    for line in lines[begin:end]:
        indent = len(line) - len(line.lstrip())
        margin = indent if margin < 0 and line.strip() else margin
        entry = _GOOGLE_ENTRY.fullmatch(line.strip()) if indent == margin else None
        if entry:
            name = entry[1]
            entries[name] = [entry[2]]
        elif name:
            entries[name].append(line)
    return end, entries


def _numpy(lines: list[str], begin: int, parameters: Collection[str]) -> tuple[int, dict[str, list[str]]]:
    entries: dict[str, list[str]] = {}
    names: list[str] = []
    end = begin
    while end < len(lines):
        line = lines[end]
        if end + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[end + 1]):
            break
        entry = _NUMPY_ENTRY.fullmatch(line) if line and not line[0].isspace() else None
        if entry:
            entry_names = [each.strip().lstrip("*") for each in entry[1].split(",")]
            if not lines[end - 1].strip() and not any(each in parameters for each in entry_names):
                break  # prose after the section
            names = entry_names
            entries |= {each: [] for each in names}
        elif line.strip() and not line[0].isspace():
            break
        else:
            for each in names:
                entries[each].append(line)
        end += 1
    return end, entries


def _indented_lines(lines: list[str], begin: int, *, over_blanks: bool = False) -> int:
    end = begin
    while end < len(lines) and (lines[end][:1].isspace() or (over_blanks and not lines[end].strip())):
        end += 1
    return end


def _joined_lines(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())
