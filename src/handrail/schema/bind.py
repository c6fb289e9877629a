"""Validated arguments into a call of the function; how, is chosen once, at registration.

Validation against the published schema has always happened before. Binding only converts: `1.0` for an `int`, text for
a `datetime`, an object for a dataclass.
"""

from __future__ import annotations

import re
from collections import abc
from collections.abc import Callable
from enum import Enum
from inspect import Parameter
from pathlib import PurePath
from types import NoneType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from msgspec import Struct, ValidationError, convert, defstruct, field, json, structs

from handrail.errors import Kind, Refused, SchemaError
from handrail.model import Json, Object
from handrail.schema.compile import compile_schema
from handrail.schema.plain import plain
from handrail.schema.types import Types, is_record, options_of, unwrapped

__all__ = ["Invoke", "Taken", "arrives_as_is", "converter", "invoker", "keyword_invoker", "refused"]

Invoke = Callable[[Object, Any], Any]

_AS_IS = (str, bool, NoneType, None, Any, object, Parameter.empty, dict, list, abc.Sequence, abc.Mapping)
_LISTS = (list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable)
_DICTS = (dict, abc.Mapping, abc.MutableMapping)
_IMMUTABLE = (str, bytes, int, float, bool, NoneType, Enum)
_UNION: Any = Union  # of types known only here, which is beyond type checkers
_PLACE = re.compile(r"(?s)(.*) - at `\$\.?(.*)`")


class Taken(NamedTuple):
    """What a function takes: its parameters in order with resolved hints, and the name of the one for the call."""

    parameters: list[Parameter]
    call: str | None
    anything_else: bool  # it has **kwargs

    @property
    def arguments(self) -> list[Parameter]:
        """The parameters that come from the caller."""
        return [each for each in self.parameters if each.name != self.call]

    def named(self, *kinds: object) -> list[str]:
        return [each.name for each in self.parameters if each.kind in kinds]


def invoker(function: Callable[..., Any], taken: Taken, types: Types, *, is_open: bool) -> Invoke:
    """Binds by the hints. `is_open`: arguments the function does not know may come, and are left out."""
    as_is = all(arrives_as_is(each.annotation) for each in taken.arguments)
    if as_is and is_open == taken.anything_else and not taken.named(Parameter.POSITIONAL_ONLY):
        return _direct(function, taken)
    kinds = [_checked(each, types) for each in taken.arguments]
    fields = [
        (f"p{i}", kind) if each.default is Parameter.empty else (f"p{i}", kind, _default(each.default))
        for i, (each, kind) in enumerate(zip(taken.arguments, kinds, strict=True))
    ]
    rename = {f"p{i}": each.name for i, each in enumerate(taken.arguments)}
    shape = defstruct("Arguments", fields, rename=rename, kw_only=True, gc=False)
    options: Object = {"dec_hook": _hook, "str_keys": True} if types.special else {}
    return _structured(function, taken, shape, options)


def keyword_invoker(function: Callable[..., Any], taken: Taken, bind: Callable[[Object], Object]) -> Invoke:
    """Binds by `bind`, which gives the arguments by name; absent ones keep the function's own defaults."""
    only = [each for each in taken.parameters if each.kind is Parameter.POSITIONAL_ONLY]
    names = {each.name for each in taken.parameters}

    def invoke(arguments: Object, call: Any) -> Any:
        bound = bind(arguments)
        if not taken.anything_else:
            bound = {name: value for name, value in bound.items() if name in names}
        if taken.call is not None:
            bound = {**bound, taken.call: call}
        return function(*[bound.pop(each.name, each.default) for each in only], **bound)

    return invoke


def converter(kind: Any, types: Types, at: str) -> Callable[[Json], Any]:
    """A function from a valid JSON value to the type."""
    bound = _bindable(kind, types, at)
    _supported(bound, types, at)
    return lambda value: _converted(value, bound)


def arrives_as_is(hint: Any) -> bool:
    """Whether every valid JSON value for the hint already is what the hint says."""
    hint = unwrapped(hint)
    if hint in _AS_IS:
        return True
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return all(type(each) in (str, bool, NoneType) for each in arguments)
    if origin in _LISTS:
        return arrives_as_is(arguments[0])
    if origin in _DICTS:
        return unwrapped(arguments[0]) is str and arrives_as_is(arguments[1])
    options = options_of(hint)
    return len(options) > 1 and all(arrives_as_is(each) for each in options)


def refused(error: Exception) -> Refused:
    """A valid argument that cannot be had as the type, such as a leap second as a datetime: the caller's to mend."""
    found = _PLACE.fullmatch(str(error))
    text = f"{found[2]}: {found[1]}" if found and found[2] else str(error)
    return Refused(Kind.BAD_ARGUMENTS, text)


def _direct(function: Callable[..., Any], taken: Taken) -> Invoke:
    name = taken.call
    if name is None:
        return lambda arguments, call: function(**arguments)
    if taken.named(Parameter.POSITIONAL_OR_KEYWORD)[:1] == [name] and not taken.anything_else:
        return lambda arguments, call: function(call, **arguments)
    return lambda arguments, call: function(**{**arguments, name: call})


def _structured(function: Callable[..., Any], taken: Taken, shape: type[Struct], options: Object) -> Invoke:
    values = structs.astuple
    names = [each.name for each in taken.arguments]
    first = taken.named(Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    last = taken.named(Parameter.KEYWORD_ONLY)

    def by_position(arguments: Object, call: Any) -> Any:
        try:
            bound = convert(arguments, shape, **options)
        except ValidationError:
            bound = _converted(arguments, shape)
        return function(*values(bound))

    def after_the_call(arguments: Object, call: Any) -> Any:
        try:
            bound = convert(arguments, shape, **options)
        except ValidationError:
            bound = _converted(arguments, shape)
        return function(call, *values(bound))

    def by_name(arguments: Object, call: Any) -> Any:
        bound = dict(zip(names, values(_converted(arguments, shape)), strict=True))
        if taken.call is not None:
            bound[taken.call] = call
        others = {name: arguments[name] for name in arguments if name not in bound} if taken.anything_else else {}
        return function(*[bound[name] for name in first], **{name: bound[name] for name in last}, **others)

    if last or taken.anything_else:
        return by_name
    if taken.call is None:
        return by_position
    return after_the_call if first[0] == taken.call else by_name


def _converted(value: Json, kind: Any) -> Any:
    try:
        return convert(value, kind, dec_hook=_hook, str_keys=True)
    except ValidationError:
        pass
    try:
        # JSON Schema calls 1.0 an integer; msgspec does not.
        return convert(_integral(value), kind, dec_hook=_hook, str_keys=True)
    except ValidationError as error:
        raise refused(error) from None


def _integral(value: Json) -> Json:
    if type(value) is float and value.is_integer():
        return int(value)
    if type(value) is dict:
        return {name: _integral(inner) for name, inner in value.items()}
    return [_integral(inner) for inner in value] if type(value) is list else value


class _Bound(type):
    """The type of stand-ins for what msgspec cannot decode by itself; `bind` does it, and any result will do."""

    bind: Callable[[Json], Any]

    def __instancecheck__(cls, instance: object) -> bool:
        return True


def _stand_in(bind: Callable[[Json], Any], types: Types) -> Any:
    types.special = True
    return _Bound("Bound", (), {"bind": staticmethod(bind)})


def _hook(kind: type, value: Json) -> Any:
    if isinstance(kind, _Bound):
        return kind.bind(value)
    if issubclass(kind, PurePath) and isinstance(value, str):
        return kind(value)
    raise ValueError(f"Expected {kind.__name__}")


def _checked(parameter: Parameter, types: Types) -> Any:
    at = f"parameter {parameter.name!r}"
    kind = Any if arrives_as_is(parameter.annotation) else _bindable(parameter.annotation, types, at)
    _supported(kind, types, at)
    return kind


def _supported(kind: Any, types: Types, at: str) -> None:
    try:
        json.Decoder(kind)
    except (TypeError, NameError) as error:
        raise SchemaError(
            f"{types.where}: {at} cannot be bound: {error}; use an explicit schema and plain types"
        ) from None


def _bindable(hint: Any, types: Types, at: str) -> Any:
    """The hint as msgspec can decode it, with stand-ins where it cannot."""
    hint = unwrapped(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if arrives_as_is(hint):
        return hint if _decodes(hint) else _stand_in(lambda value: value, types)
    if _listed(hint):
        return _members(hint, types)
    options = options_of(hint)
    if len(options) > 1:
        return _choice(hint, options, types, at)
    if origin is None or not arguments or origin is type or is_record(origin):
        return hint
    inner = tuple(each if each is Ellipsis else _bindable(each, types, at) for each in arguments)
    return origin[inner]


def _listed(hint: Any) -> list[Any]:
    """The members of a Literal or an Enum; nothing of other types."""
    hint = unwrapped(hint)
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return list(hint) if isinstance(hint, type) and issubclass(hint, Enum) else []


def _members(hint: Any, types: Types) -> Any:
    if _decodes(hint):
        return hint
    table = {_key(plain(member)): member for member in _listed(hint)}
    return _stand_in(lambda value: _looked_up(table, value), types)


def _decodes(kind: Any) -> bool:
    try:
        json.Decoder(kind)
    except TypeError:
        return False
    return True


def _key(value: Json) -> Json:
    return (value,) if type(value) is bool else value  # True == 1, but not in JSON


def _looked_up(table: dict[Json, Any], value: Json) -> Any:
    if type(value) in (dict, list) or _key(value) not in table:
        raise ValueError("not one of the listed values")
    return table[_key(value)]


def _choice(hint: Any, options: list[Any], types: Types, at: str) -> Any:
    kinds = [_bindable(each, types, at) for each in options]
    # msgspec would take an integer for one of the listed ones, although it may be meant as a float.
    listed = [member for each in options for member in _listed(each)]
    ambiguous = float in map(unwrapped, options) and any(type(plain(member)) is int for member in listed)
    union = _UNION[tuple(kinds)]
    if not ambiguous and _decodes(union):
        return union
    # Two kinds of object, say: the published schema of each decides, because msgspec would drop what it does not know.
    checks = []
    for option, kind in zip(options, kinds, strict=True):
        alone = Types(types.where, types.names, closed=True)
        schema = alone.finished(alone.schema(option, at))
        checks.append((compile_schema(schema, f"{types.where}: {at}", any_root=True).valid, kind))
        _supported(kind, types, at)

    def bind(value: Json) -> Any:
        for valid, kind in checks:
            if valid(value):
                return _converted(value, kind)
        raise ValueError(f"none of the forms of {hint} fits")

    return _stand_in(bind, types)


def _default(value: Any) -> Any:
    return value if isinstance(value, _IMMUTABLE) else field(default_factory=lambda: value)
