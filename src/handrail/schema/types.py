"""Python types as JSON Schema.

One `Types` makes the schemas of one signature. Classes are written out where they are used; only those that contain
themselves go to `$defs`. Nothing is invented: no titles, no order but the one in the source.
"""

from __future__ import annotations

import dataclasses
import re
from collections import abc
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from inspect import Parameter
from pathlib import PurePath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Required,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)
from uuid import UUID

from msgspec import NODEFAULT, UNSET, Struct, UnsetType, structs

from handrail.errors import SchemaError
from handrail.model import Json, Object
from handrail.schema.plain import plain

__all__ = ["Field", "Types", "fields_of", "is_record", "object_schema", "options_of", "unwrapped"]

_SECONDS = r"\d{1,9}(\.\d{1,6})?S"
_CLOCK = rf"T(\d{{1,6}}H(\d{{1,6}}M)?({_SECONDS})?|\d{{1,6}}M({_SECONDS})?|{_SECONDS})"
_BASE64 = "[A-Za-z0-9+/]"
_SCALARS: dict[Any, Object] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    NoneType: {"type": "null"},
    None: {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    time: {"type": "string", "format": "time"},
    # Years, months and weeks are left out: they have no length in a timedelta.
    timedelta: {"type": "string", "format": "duration", "pattern": rf"^P(\d{{1,6}}D({_CLOCK})?|{_CLOCK})$"},
    UUID: {"type": "string", "format": "uuid"},
    bytes: {
        "type": "string",
        "contentEncoding": "base64",
        "pattern": f"^({_BASE64}{{4}})*({_BASE64}{{2}}==|{_BASE64}{{3}}=)?$",
    },
}
_DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^-?\d{1,100}(\.\d{1,100})?$"}]}
_ANYTHING = (Any, object, Parameter.empty)
_ARRAYS = {list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable}
_SETS = {set, frozenset, abc.Set, abc.MutableSet}
_MAPPINGS = {dict, abc.Mapping, abc.MutableMapping}
_WRAPPERS = (Required, NotRequired, Final, ClassVar)

# The attributes of msgspec.Meta and of the annotated_types package, which agree on their names.
_BOUNDS = {
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "lt": "exclusiveMaximum",
    "le": "maximum",
    "multiple_of": "multipleOf",
    "pattern": "pattern",
    "title": "title",
    "description": "description",
    "documentation": "description",
    "examples": "examples",
}
_LENGTHS = {
    "string": ("minLength", "maxLength"),
    "array": ("minItems", "maxItems"),
    "object": ("minProperties", "maxProperties"),
}


class Field(NamedTuple):
    """One member of an object: its JSON name, its hint, whether it must be there, its default (or UNSET)."""

    name: str
    hint: Any
    required: bool
    default: Any


class Types:
    """Schemas for hints. `closed` objects refuse unknown members; `names` resolves what modules do not define."""

    def __init__(self, where: str, names: Mapping[str, Any], *, closed: bool) -> None:
        self.where = where
        self.names = names
        self.closed = closed
        self.definitions: Object = {}
        self.special = False  # something in it msgspec decodes only with help
        self._labels: dict[Any, str] = {}
        self._open: list[Any] = []

    def schema(self, hint: Any, at: str) -> Object:
        """The schema of one hint; `at` names the parameter or member for error messages."""
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._annotated(self.schema(arguments[0], at), hint.__metadata__)
        if hint in _ANYTHING or hint is UnsetType:
            return {}
        try:
            if hint in _SCALARS:
                return dict(_SCALARS[hint])
        except TypeError:  # not hashable, so certainly not a type
            raise self.refusal(hint, at) from None
        if origin in _WRAPPERS:
            return self.schema(arguments[0], at)
        if isinstance(hint, NewType):
            return self.schema(hint.__supertype__, at)
        if isinstance(hint, TypeVar):
            return self._union(list(hint.__constraints__) or [hint.__bound__ or Any], at)
        if hasattr(hint, "__value__"):  # a `type X = …` alias
            return self._named(hint, at, lambda: self.schema(hint.__value__, at))
        if origin is Literal:
            return _enumeration([plain(each) for each in arguments])
        if origin is Union or origin is UnionType:
            return self._union([each for each in arguments if each is not UnsetType], at)
        base = origin or hint
        if base in _ARRAYS or base in _SETS:
            unique = {"uniqueItems": True} if base in _SETS else {}
            return {"type": "array", **self._inner("items", arguments[:1], at), **unique}
        if base is tuple:
            return self._tuple(arguments if origin else (Any, ...), at)
        if base in _MAPPINGS:
            return self._mapping(arguments, at)
        if isinstance(hint, type):
            return self._class(hint, at)
        raise self.refusal(hint, at)

    def finished(self, root: Object) -> Object:
        """A root schema with the definitions it needs; a root that is only a reference is written out."""
        if set(root) == {"$ref"}:
            root = dict(self.definitions[root["$ref"].removeprefix("#/$defs/")])
        return {**root, "$defs": self.definitions} if self.definitions else root

    def refusal(self, hint: Any, at: str) -> SchemaError:
        name = hint.__qualname__ if isinstance(hint, type) else str(hint)
        advice = "use JSON types, a dataclass, a TypedDict or a Struct, or pass an explicit schema"
        return SchemaError(f"{self.where}: {at}: {name} has no JSON Schema; {advice}")

    def _class(self, hint: type, at: str) -> Object:
        if issubclass(hint, Enum):
            return _enumeration([plain(member) for member in hint])
        if issubclass(hint, PurePath):
            self.special = True
            return {"type": "string"}
        if issubclass(hint, Decimal):
            return dict(_DECIMAL) if self.closed else {"type": "string"}
        if is_record(hint):
            return self._named(hint, at, lambda: self._record(hint, at))
        raise self.refusal(hint, at)

    def _record(self, hint: type, at: str) -> Object:
        members = fields_of(hint, self.names, self.where)
        if issubclass(hint, tuple) or (issubclass(hint, Struct) and hint.__struct_config__.array_like):
            required = sum(field.required for field in members)
            items = [self.schema(field.hint, f"{at}.{field.name}") for field in members]
            return {"type": "array", "prefixItems": items, "minItems": required, "maxItems": len(items)}
        return object_schema(self, members, at, closed=self.closed)

    def _named(self, hint: Any, at: str, make: Callable[[], Object]) -> Object:
        label = self._labels.get(hint)
        if label is None and hint in self._open:
            label = str(hint.__name__)
            while label in self._labels.values():
                label += "_"
            self._labels[hint] = label
        if label is not None:
            return {"$ref": f"#/$defs/{label}"}
        self._open.append(hint)
        made = make()
        self._open.pop()
        label = self._labels.get(hint)
        if label is None:
            return made
        self.definitions[label] = made
        return {"$ref": f"#/$defs/{label}"}

    def _union(self, options: list[Any], at: str) -> Object:
        schemas: list[Object] = []
        for option in options:
            schema = self.schema(option, at)
            if schema == {}:
                return {}
            if schema not in schemas:
                schemas.append(schema)
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _inner(self, keyword: str, arguments: tuple[Any, ...], at: str) -> Object:
        inner = self.schema(arguments[0], at) if arguments else {}
        return {keyword: inner} if inner else {}

    def _tuple(self, arguments: tuple[Any, ...], at: str) -> Object:
        if arguments[-1:] == (Ellipsis,):
            return {"type": "array", **self._inner("items", arguments[:1], at)}
        items = [self.schema(each, at) for each in arguments]
        prefix = {"prefixItems": items} if items else {}
        return {"type": "array", **prefix, "minItems": len(items), "maxItems": len(items)}

    def _mapping(self, arguments: tuple[Any, ...], at: str) -> Object:
        schema: Object = {"type": "object", **self._inner("additionalProperties", arguments[1:], at)}
        key = self.schema(arguments[0], at) if arguments else {}
        self.special = self.special or key not in ({}, {"type": "string"})
        if key.get("type") == "integer":
            schema["propertyNames"] = {"pattern": r"^(0|-?[1-9]\d{0,17})$"}
        elif key.get("type", "string") != "string" or "anyOf" in key:
            raise SchemaError(f"{self.where}: {at}: keys of a JSON object are strings, not {arguments[0]}")
        elif key.keys() - {"type"}:
            schema["propertyNames"] = key
        return schema

    def _annotated(self, schema: Object, metadata: tuple[Any, ...]) -> Object:
        # Beside anyOf the bounds belong to the one branch they can speak of: `Annotated[int | None, Ge(0)]`.
        branches = schema.get("anyOf", [])
        inner = next((each for each in branches if each.get("type") != "null"), schema)
        for note in metadata:
            if isinstance(note, str):
                schema["description"] = note
            elif isinstance(note, Mapping):
                schema.update(note)
            elif not isinstance(note, type):
                _constrain(schema, inner, note)
        return schema


def object_schema(types: Types, members: list[Field], at: str, *, closed: bool) -> Object:
    """An object schema of these members; parts that would be empty are left out."""
    schema: Object = {"type": "object"}
    properties: Object = {}
    for field in members:
        inner = types.schema(field.hint, f"{at}.{field.name}" if at else f"parameter {field.name!r}")
        if field.default is not UNSET:
            inner = _with_default(inner, field.default)
        properties[field.name] = inner
    if properties:
        schema["properties"] = properties
    required = [field.name for field in members if field.required]
    if required:
        schema["required"] = required
    if closed:
        schema["additionalProperties"] = False
    return schema


def is_record(hint: Any) -> bool:
    """Whether the class has named, typed members: dataclass, TypedDict, NamedTuple or Struct."""
    if not isinstance(hint, type):
        return False
    named_tuple = issubclass(hint, tuple) and hasattr(hint, "_fields")
    return dataclasses.is_dataclass(hint) or is_typeddict(hint) or named_tuple or issubclass(hint, Struct)


def fields_of(kind: Any, names: Mapping[str, Any], where: str) -> list[Field]:
    """The members of a record class, in order."""
    hints = _class_hints(kind, names, where)
    if is_typeddict(kind):
        return [_typed_dict_field(kind, name, hint) for name, hint in hints.items()]
    if issubclass(kind, Struct):
        return _struct_fields(kind, hints)
    if issubclass(kind, tuple):
        defaults = kind._field_defaults
        return [
            Field(name, hints.get(name, Any), name not in defaults, defaults.get(name, UNSET)) for name in kind._fields
        ]
    members = []
    for field in dataclasses.fields(kind):
        default: Any = UNSET
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.init:
            members.append(Field(field.name, hints[field.name], default is UNSET, default))
    return members


def options_of(hint: Any) -> list[Any]:
    """The alternatives of a union, or the hint alone."""
    hint = unwrapped(hint)
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def unwrapped(hint: Any) -> Any:
    """The hint without what surrounds it: Annotated, Required, NewType, aliases."""
    while True:
        if get_origin(hint) is Annotated or get_origin(hint) in _WRAPPERS:
            hint = get_args(hint)[0]
        elif isinstance(hint, NewType):
            hint = hint.__supertype__
        elif hasattr(hint, "__value__") and not isinstance(hint, Enum | type):
            hint = hint.__value__
        else:
            return hint


def _class_hints(kind: Any, names: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError:
        pass
    try:
        hints = get_type_hints(kind, localns=dict(names), include_extras=True)
    except NameError as error:
        raise SchemaError(f"{where}: a hint in {kind.__qualname__} cannot be resolved: {error}") from None
    # msgspec reads the annotations too and knows module names only: for a class made inside a function they are put in.
    kind.__annotations__ = {name: hints[name] for name in kind.__annotations__}
    return hints


def _typed_dict_field(kind: Any, name: str, hint: Any) -> Field:
    # __required_keys__ alone is wrong when the annotations are strings (`from __future__ import annotations`).
    required = name in kind.__required_keys__
    inner = hint
    while get_origin(inner) in (Annotated, *_WRAPPERS):
        if get_origin(inner) in (Required, NotRequired):
            required = get_origin(inner) is Required
        inner = get_args(inner)[0]
    return Field(name, hint, required, UNSET)


def _struct_fields(kind: type[Struct], hints: dict[str, Any]) -> list[Field]:
    config = kind.__struct_config__
    members = []
    if config.tag is not None:
        tag: Any = Literal[config.tag]
        members.append(Field(str(config.tag_field), tag, True, UNSET))
    for info in structs.fields(kind):
        default = info.default if info.default is not NODEFAULT else UNSET
        if info.default_factory is not NODEFAULT:
            default = info.default_factory()
        members.append(Field(info.encode_name, hints[info.name], info.required, default))
    return members


def _enumeration(values: list[Json]) -> Object:
    kinds = {str: "string", int: "integer", bool: "boolean"}
    types = {kinds.get(type(value)) for value in values}
    kind = types.pop() if len(types) == 1 else None
    return {"type": kind, "enum": values} if kind else {"enum": values}


def _constrain(schema: Object, inner: Object, note: Any) -> None:
    for attribute, keyword in _BOUNDS.items():
        limit = getattr(note, attribute, None)
        if limit is None or callable(limit):
            continue
        try:
            target = schema if keyword in ("title", "description", "examples") else inner
            target[keyword] = plain(limit.pattern if isinstance(limit, re.Pattern) else limit)
        except ValueError:
            continue
    for attribute, keyword in zip(("min_length", "max_length"), _LENGTHS.get(inner.get("type", ""), ()), strict=False):
        length = getattr(note, attribute, None)
        if isinstance(length, int) and not (length == 0 and attribute == "min_length"):
            inner[keyword] = length
    extra = getattr(note, "extra_json_schema", None)
    if isinstance(extra, Mapping):
        schema.update(extra)


def _with_default(schema: Object, default: Any) -> Object:
    # `x: str = None` is common and not what the schema says; a default that breaks its own schema misleads.
    types = [schema.get("type"), *(each.get("type") for each in schema.get("anyOf", ()))]
    if default is None and schema and "null" not in types and None not in schema.get("enum", ()):
        return schema
    if dataclasses.is_dataclass(default) and not all(field.init for field in dataclasses.fields(default)):
        return schema
    try:
        return {**schema, "default": plain(default)}
    except ValueError:
        return schema
