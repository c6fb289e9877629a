"""Python types as JSON Schema.

One `Types` makes the schemas of one signature. Classes are written out where they are used; only those that contain
themselves go to `$defs`. Nothing is invented: no titles, no order but the one in the source.
"""

from __future__ import annotations

import dataclasses
import typing
from collections import abc
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from inspect import Parameter
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Required, Union, get_args, get_origin
from uuid import UUID

from msgspec import NODEFAULT, UNSET, Struct, UnsetType, structs

from handrail.errors import SchemaError
from handrail.model import Json, Object
from handrail.schema.jsonable import to_jsonable

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


class Types:
    """Schemas for hints. `closed` objects refuse unknown members; `where` begins the text of every refusal."""

    def __init__(self, where: str, *, closed: bool) -> None:
        self.where = where
        self.closed = closed
        self.definitions: Object = {}
        self.has_paths = False  # which msgspec converts only with help
        self._labels: dict[Any, str] = {}  # of what contains itself
        self._in_progress: list[Any] = []

    def schema(self, hint: Any, at: str) -> Object:
        """The schema of one hint; `at` names the parameter or member for error messages."""
        if hasattr(hint, "__value__"):  # a `type X = …` alias, which may contain itself
            return self._inline_or_ref(hint, lambda: self.schema(hint.__value__, at))
        inner = _unwrap(hint)
        if inner is not hint:
            return _annotate(self.schema(inner, at), getattr(hint, "__metadata__", ()))
        origin, arguments = get_origin(hint), get_args(hint)
        base = origin or hint
        if origin is Literal:
            return _enumeration([to_jsonable(each) for each in arguments])
        if origin in (Union, UnionType):
            return self._union([self.schema(each, at) for each in arguments if each is not UnsetType], at)
        if base in _SCALARS:
            return dict(_SCALARS[base])
        if base in _MAPPINGS:
            key, value = arguments or (str, Any)
            if options_of(key) not in ([str], [Any]):
                raise SchemaError(f"{self.where}: {at}: keys of a JSON object are strings, not {key}")
            inner = self.schema(value, at)
            return {"type": "object", **({"additionalProperties": inner} if inner else {})}
        if base in _ARRAYS or hint is tuple or (origin is tuple and arguments[1:] == (Ellipsis,)):
            items = self.schema(arguments[0], at) if arguments else {}
            unique = {"uniqueItems": True} if base in _SETS else {}
            return {"type": "array", **({"items": items} if items else {}), **unique}
        if origin is tuple:
            first = [self.schema(each, at) for each in arguments]
            return {"type": "array", "prefixItems": first, "minItems": len(first), "maxItems": len(first)}
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _enumeration([to_jsonable(member) for member in hint])
        if isinstance(hint, type) and issubclass(hint, PurePath):
            self.has_paths = True
            return {"type": "string"}
        if hint is Decimal:
            return {"type": ["number", "string"] if self.closed else "string"}
        if is_record(hint):
            members = fields_of(hint, self.where)
            return self._inline_or_ref(hint, lambda: self.object_schema(members, at, closed=self.closed))
        name = hint.__qualname__ if isinstance(hint, type) else str(hint)
        advice = "use JSON types, a dataclass, a TypedDict or a Struct, or pass an explicit schema"
        raise SchemaError(f"{self.where}: {at}: {name} has no JSON Schema; {advice}")

    def object_schema(self, members: list[Field], at: str, *, closed: bool) -> Object:
        """An object schema of these members; parts that would be empty are left out."""
        properties: Object = {}
        for name, hint, default in members:
            properties[name] = self.schema(hint, f"{at}.{name}" if at else f"parameter {name!r}")
            _add_default(properties[name], default)
        required = [each.name for each in members if each.default is Parameter.empty]
        parts = {"properties": properties, "required": required}
        closing = {"additionalProperties": False} if closed else {}
        return {"type": "object", **{key: part for key, part in parts.items() if part}, **closing}

    def with_definitions(self, root: Object) -> Object:
        """A root schema with the definitions it needs; a root that is only a reference is written out."""
        if set(root) == {"$ref"}:
            root = dict(self.definitions[root["$ref"].removeprefix("#/$defs/")])
        return {**root, "$defs": self.definitions} if self.definitions else root

    def _inline_or_ref(self, hint: Any, make: Callable[[], Object]) -> Object:
        if hint in self._in_progress and hint not in self._labels:
            name_exists = hint.__name__ in self._labels.values()
            self._labels[hint] = f"{hint.__name__}_{len(self._labels)}" if name_exists else hint.__name__
        if hint not in self._labels:
            self._in_progress.append(hint)
            schema = make()
            self._in_progress.pop()
            if hint not in self._labels:
                return schema
            self.definitions[self._labels[hint]] = schema
        return {"$ref": f"#/$defs/{self._labels[hint]}"}

    def _union(self, schemas: list[Object], at: str) -> Object:
        listed = any(type(value) is int for each in schemas for value in each.get("enum", ()))
        if self.closed and listed and any(each.get("type") == "number" for each in schemas):
            raise SchemaError(f"{self.where}: {at}: float beside listed integers cannot be told apart")
        different = [each for i, each in enumerate(schemas) if each not in schemas[:i]]
        if {} in different:
            return {}
        return different[0] if len(different) == 1 else {"anyOf": different}


def is_record(hint: Any) -> bool:
    """Whether the class has named, typed members and is an object in JSON: dataclass, TypedDict or Struct."""
    if not isinstance(hint, type):
        return False
    is_struct = issubclass(hint, Struct) and not hint.__struct_config__.array_like
    return is_struct or dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)


def fields_of(kind: Any, where: str) -> list[Field]:
    """The members of a record class, in order."""
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise SchemaError(f"{where}: {kind.__qualname__}: {error}; define it in the module") from None
    if typing.is_typeddict(kind):
        return [Field(name, hint, _typeddict_default(kind, name, hint)) for name, hint in hints.items()]
    if issubclass(kind, Struct):
        tag: Any = Literal[kind.__struct_config__.tag]
        tags = [] if tag == Literal[None] else [Field(str(kind.__struct_config__.tag_field), tag, Parameter.empty)]
        return tags + [Field(each.encode_name, hints[each.name], _default(each)) for each in structs.fields(kind)]
    return [Field(each.name, hints[each.name], _default(each)) for each in dataclasses.fields(kind) if each.init]


def options_of(hint: Any) -> list[Any]:
    """The alternatives of a union, or the hint alone, without what surrounds them: Annotated, NewType, aliases."""
    inner = _unwrap(hint)
    if inner is not hint:
        return options_of(inner)
    inside = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return [option for each in inside for option in options_of(each)] or [hint]


def _unwrap(hint: Any) -> Any:
    if get_origin(hint) in (Annotated, Required, NotRequired):
        return get_args(hint)[0]
    return getattr(hint, "__value__", getattr(hint, "__supertype__", hint))


def _typeddict_default(kind: Any, name: str, hint: Any) -> Any:
    # __required_keys__ alone is wrong when the annotations are strings (`from __future__ import annotations`).
    origins = {get_origin(hint), get_origin(next(iter(get_args(hint)), None))}
    required = Required in origins or (name in kind.__required_keys__ and NotRequired not in origins)
    return Parameter.empty if required else UNSET


def _default(field: Any) -> Any:
    missing = (dataclasses.MISSING, NODEFAULT)
    if not any(field.default_factory is each for each in missing):
        return field.default_factory()
    return Parameter.empty if any(field.default is each for each in missing) else field.default


def _enumeration(values: list[Json]) -> Object:
    kinds = {str: "string", int: "integer", bool: "boolean"}
    types = {kinds.get(type(value)) for value in values}
    kind = types.pop() if len(types) == 1 else None
    return {"type": kind, "enum": values} if kind else {"enum": values}


def _annotate(schema: Object, metadata: tuple[Any, ...]) -> Object:
    # Beside anyOf the bounds belong to the one branch they can speak of: `Annotated[int | None, Ge(0)]`.
    inner = next((each for each in schema.get("anyOf", ()) if each.get("type") != "null"), schema)
    unit = _LENGTHS.get(str(inner.get("type")))
    bounds = {**_BOUNDS, "min_length": f"min{unit}", "max_length": f"max{unit}"} if unit else _BOUNDS
    for note in metadata:
        if isinstance(note, str | Mapping):
            schema.update({"description": note} if isinstance(note, str) else note)
        elif not isinstance(note, type):
            inner.update(_keywords_of(note, bounds))
            schema.update(_keywords_of(note, _NOTES), **(getattr(note, "extra_json_schema", None) or {}))
    return schema


def _keywords_of(note: Any, keywords: dict[str, str]) -> Object:
    limits = {keyword: getattr(note, attribute, None) for attribute, keyword in keywords.items()}
    return {
        keyword: to_jsonable(limit) for keyword, limit in limits.items() if limit is not None and not callable(limit)
    }


def _add_default(schema: Object, default: Any) -> None:
    # `x: str = None` is common and not what the schema says; a default that breaks its own schema misleads.
    types = [schema.get("type"), *(each.get("type") for each in schema.get("anyOf", ()))]
    is_wrong = default is None and schema and "null" not in types and None not in schema.get("enum", ())
    if not (default is UNSET or default is Parameter.empty or is_wrong):
        with suppress(ValueError):  # not all defaults can be said in JSON
            schema["default"] = to_jsonable(default)
