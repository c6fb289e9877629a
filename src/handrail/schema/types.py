"""Python types as JSON Schema.

One `Types` makes the schemas of one signature. Classes are written out where they are used; only those that contain
themselves go to `$defs`. Nothing is invented: no titles, no order but the one in the source.
"""

from __future__ import annotations

import dataclasses
import typing
from collections import abc
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from inspect import Parameter
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NewType, NotRequired, Required, Union, get_args, get_origin
from uuid import UUID

from msgspec import NODEFAULT, UNSET, Struct, UnsetType, structs

from handrail.errors import SchemaError
from handrail.model import Json, Object
from handrail.schema.plain import plain

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
    timedelta: {"type": "string", "format": "duration"},
    UUID: {"type": "string", "format": "uuid"},
    bytes: {"type": "string", "contentEncoding": "base64"},
    **{anything: {} for anything in (Any, object, Parameter.empty, UnsetType)},
}
_SETS = {set, frozenset, abc.Set, abc.MutableSet}
_ARRAYS = {list, abc.Sequence, abc.MutableSequence, abc.Collection} | _SETS
_MAPPINGS = {dict, abc.Mapping, abc.MutableMapping}

# The attributes of msgspec.Meta and of the annotated_types package, which agree on their names.
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
_BOUNDS |= {"multiple_of": "multipleOf", "pattern": "pattern"}
_NOTES = {"title": "title", "description": "description", "examples": "examples"}
_LENGTHS = {"string": "Length", "array": "Items", "object": "Properties"}


class Field(NamedTuple):
    """One member of an object. Its default is Parameter.empty when it is required, UNSET when it is merely absent."""

    name: str
    hint: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is Parameter.empty


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
        base = origin or hint
        if origin is Annotated:
            return _annotated(self.schema(arguments[0], at), hint.__metadata__)
        if origin in (Required, NotRequired):
            return self.schema(arguments[0], at)
        if isinstance(hint, NewType):
            return self.schema(hint.__supertype__, at)
        if hasattr(hint, "__value__"):  # a `type X = …` alias
            return self._named(hint, lambda: self.schema(hint.__value__, at))
        if origin is Literal:
            return _enumeration([plain(each) for each in arguments])
        if origin in (Union, UnionType):
            return self._union([self.schema(each, at) for each in arguments if each is not UnsetType], at)
        if not isinstance(base, abc.Hashable):
            raise self._refusal(hint, at)
        if base in _SCALARS:
            self.special = self.special or base is object
            return dict(_SCALARS[base])
        if base in _ARRAYS or (base is tuple and arguments[1:] in ((), (Ellipsis,))):
            inner = self.schema(arguments[0], at) if arguments else {}
            unique = {"uniqueItems": True} if base in _SETS else {}
            return {"type": "array", **({"items": inner} if inner else {}), **unique}
        if base is tuple:
            return _tuple([self.schema(each, at) for each in arguments], len(arguments))
        if base in _MAPPINGS:
            return self._mapping(arguments or (str, Any), at)
        if isinstance(hint, type):
            return self._class(hint, at)
        raise self._refusal(hint, at)

    def object_schema(self, members: list[Field], at: str, *, closed: bool) -> Object:
        """An object schema of these members; parts that would be empty are left out."""
        properties = {
            field.name: _with_default(
                self.schema(field.hint, f"{at}.{field.name}" if at else f"parameter {field.name!r}"), field.default
            )
            for field in members
        }
        required = [field.name for field in members if field.required]
        parts = {"properties": properties, "required": required}
        closing = {"additionalProperties": False} if closed else {}
        return {"type": "object", **{key: part for key, part in parts.items() if part}, **closing}

    def finished(self, root: Object) -> Object:
        """A root schema with the definitions it needs; a root that is only a reference is written out."""
        if set(root) == {"$ref"}:
            root = dict(self.definitions[root["$ref"].removeprefix("#/$defs/")])
        return {**root, "$defs": self.definitions} if self.definitions else root

    def _refusal(self, hint: Any, at: str) -> SchemaError:
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
            return {"type": ["number", "string"] if self.closed else "string"}
        if is_record(hint):
            return self._named(hint, lambda: self._record(hint, at))
        raise self._refusal(hint, at)

    def _record(self, hint: type, at: str) -> Object:
        members = fields_of(hint, self.names, self.where)
        if issubclass(hint, tuple) or (issubclass(hint, Struct) and hint.__struct_config__.array_like):
            items = [self.schema(field.hint, f"{at}.{field.name}") for field in members]
            return _tuple(items, sum(field.required for field in members))
        return self.object_schema(members, at, closed=self.closed)

    def _named(self, hint: Any, make: Callable[[], Object]) -> Object:
        if hint in self._open:  # it contains itself
            taken = set(self._labels.values())
            label = hint.__name__ if hint.__name__ not in taken else f"{hint.__name__}_{len(taken)}"
            self._labels.setdefault(hint, label)
        if hint not in self._labels:
            self._open.append(hint)
            made = make()
            self._open.pop()
            if hint not in self._labels:
                return made
            self.definitions[self._labels[hint]] = made
        return {"$ref": f"#/$defs/{self._labels[hint]}"}

    def _union(self, schemas: list[Object], at: str) -> Object:
        listed = any(type(value) is int for each in schemas for value in each.get("enum", ()))
        if self.closed and listed and any(each.get("type") == "number" for each in schemas):
            raise SchemaError(f"{self.where}: {at}: float beside listed integers cannot be told apart")
        different = [each for i, each in enumerate(schemas) if each not in schemas[:i]]
        if {} in different:
            return {}
        return different[0] if len(different) == 1 else {"anyOf": different}

    def _mapping(self, arguments: tuple[Any, ...], at: str) -> Object:
        key, inner = (self.schema(each, at) for each in arguments)
        schema: Object = {"type": "object", **({"additionalProperties": inner} if inner else {})}
        self.special = self.special or key not in ({}, {"type": "string"})
        if key.get("type") == "integer":
            schema["propertyNames"] = {"pattern": r"^(0|-?[1-9]\d{0,17})$"}
        elif key.get("type", "string") != "string" or "anyOf" in key:
            raise SchemaError(f"{self.where}: {at}: keys of a JSON object are strings, not {arguments[0]}")
        elif key.keys() - {"type"}:
            schema["propertyNames"] = key
        return schema


def is_record(hint: Any) -> bool:
    """Whether the class has named, typed members: dataclass, TypedDict, NamedTuple or Struct."""
    if not isinstance(hint, type):
        return False
    named_tuple = issubclass(hint, tuple) and hasattr(hint, "_fields")
    return dataclasses.is_dataclass(hint) or typing.is_typeddict(hint) or named_tuple or issubclass(hint, Struct)


def fields_of(kind: Any, names: Mapping[str, Any], where: str) -> list[Field]:
    """The members of a record class, in order."""
    hints = _class_hints(kind, names, where)
    if typing.is_typeddict(kind):
        return [Field(name, hint, _absence(kind, name, hint)) for name, hint in hints.items()]
    if issubclass(kind, tuple):
        return [Field(name, hints[name], kind._field_defaults.get(name, Parameter.empty)) for name in kind._fields]
    if issubclass(kind, Struct):
        tag: Any = Literal[kind.__struct_config__.tag]
        tags = [] if tag == Literal[None] else [Field(str(kind.__struct_config__.tag_field), tag, Parameter.empty)]
        return tags + [Field(each.encode_name, hints[each.name], _default(each)) for each in structs.fields(kind)]
    return [Field(each.name, hints[each.name], _default(each)) for each in dataclasses.fields(kind) if each.init]


def options_of(hint: Any) -> list[Any]:
    """The alternatives of a union, or the hint alone, without what surrounds them: Annotated, NewType, aliases."""
    if get_origin(hint) is Annotated:
        return options_of(get_args(hint)[0])
    if isinstance(hint, NewType):
        return options_of(hint.__supertype__)
    if hasattr(hint, "__value__"):
        return options_of(hint.__value__)
    inside = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return [option for each in inside for option in options_of(each)] or [hint]


def _class_hints(kind: Any, names: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except NameError:
        pass
    try:
        hints = typing.get_type_hints(kind, localns=dict(names), include_extras=True)
    except NameError as error:
        raise SchemaError(f"{where}: a hint in {kind.__qualname__} cannot be resolved: {error}") from None
    # msgspec reads the annotations too and knows module names only: for a class made inside a function they are put in.
    kind.__annotations__ = {name: hints[name] for name in kind.__annotations__}
    return hints


def _absence(kind: Any, name: str, hint: Any) -> Any:
    # __required_keys__ alone is wrong when the annotations are strings (`from __future__ import annotations`).
    origins = {get_origin(hint), get_origin(next(iter(get_args(hint)), None))}
    required = Required in origins or (name in kind.__required_keys__ and NotRequired not in origins)
    return Parameter.empty if required else UNSET


def _default(field: Any) -> Any:
    missing = (dataclasses.MISSING, NODEFAULT)
    if not any(field.default_factory is each for each in missing):
        return field.default_factory()
    return Parameter.empty if any(field.default is each for each in missing) else field.default


def _tuple(items: list[Object], least: int) -> Object:
    return {"type": "array", "prefixItems": items, "minItems": least, "maxItems": len(items)}


def _enumeration(values: list[Json]) -> Object:
    kinds = {str: "string", int: "integer", bool: "boolean"}
    types = {kinds.get(type(value)) for value in values}
    kind = types.pop() if len(types) == 1 else None
    return {"type": kind, "enum": values} if kind else {"enum": values}


def _annotated(schema: Object, metadata: tuple[Any, ...]) -> Object:
    # Beside anyOf the bounds belong to the one branch they can speak of: `Annotated[int | None, Ge(0)]`.
    inner = next((each for each in schema.get("anyOf", ()) if each.get("type") != "null"), schema)
    unit = _LENGTHS.get(str(inner.get("type")))
    lengths = {"min_length": f"min{unit}", "max_length": f"max{unit}"} if unit else {}
    for note in metadata:
        if isinstance(note, str | Mapping):
            schema.update({"description": note} if isinstance(note, str) else note)
        elif not isinstance(note, type):
            inner.update(_said(note, _BOUNDS | lengths))
            schema.update(_said(note, _NOTES), **(getattr(note, "extra_json_schema", None) or {}))
    return schema


def _said(note: Any, keywords: dict[str, str]) -> Object:
    limits = {keyword: getattr(note, attribute, None) for attribute, keyword in keywords.items()}
    return {
        keyword: plain(limit)
        for keyword, limit in limits.items()
        if limit is not None and not callable(limit) and not (limit == 0 and keyword in ("minLength", "minItems"))
    }


def _with_default(schema: Object, default: Any) -> Object:
    # `x: str = None` is common and not what the schema says; a default that breaks its own schema misleads.
    types = [schema.get("type"), *(each.get("type") for each in schema.get("anyOf", ()))]
    is_wrong = default is None and schema and "null" not in types and None not in schema.get("enum", ())
    if default is UNSET or default is Parameter.empty or is_wrong:
        return schema
    try:
        return {**schema, "default": plain(default)}
    except ValueError:
        return schema
