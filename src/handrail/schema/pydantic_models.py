"""Signatures with pydantic in them: pydantic makes their schema and binds their arguments.

pydantic is never imported here. A signature that uses it has imported it, so it is in `sys.modules`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
from typing import Any, get_args

from handrail.errors import Kind, Refused, SchemaError
from handrail.model import Json, Object
from handrail.schema.types import fields_of, is_record

_MAX_ERRORS = 20
_OBJECTS = ("model_schema", "dataclass_schema", "typed_dict_schema")  # methods of pydantic's generator


def mentions_pydantic(pieces: Iterable[Any], where: str) -> bool:
    """Whether anything of pydantic stands in these hints or defaults, however deep."""
    pending = list(pieces) if "pydantic" in sys.modules else []
    for piece in pending:  # which grows meanwhile
        kind = piece if isinstance(piece, type) else type(piece)
        if kind.__module__.split(".")[0] == "pydantic" or hasattr(piece, "__pydantic_core_schema__"):
            return True
        inside = [*get_args(piece), *getattr(piece, "__metadata__", ())]
        inside += [field.hint for field in fields_of(piece, where)] if is_record(piece) else []
        pending += [each for each in inside if not any(each is other for other in pending)]
    return False


def arguments_model(
    parameters: list[Parameter], where: str, *, extra: str
) -> tuple[Object, Callable[[Object], Object]]:
    """The input schema of the parameters, and a function that gives validated arguments as pydantic has them."""

    def collect_arguments(**arguments: Any) -> Object:
        return arguments

    # pydantic reads a function's signature too. This one has all but the call, which it could not describe.
    rest = [Parameter("rest", Parameter.VAR_KEYWORD)] if extra == "allow" else []
    named = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters]
    vars(collect_arguments)["__signature__"] = Signature([*named, *rest])
    collect_arguments.__annotations__ = {
        each.name: each.annotation for each in named if each.annotation is not Parameter.empty
    }
    schema, bind = pydantic_schema(collect_arguments, where, closed=True)
    if extra == "allow":
        schema.pop("additionalProperties", None)
    return schema, bind


def pydantic_schema(
    kind: Any, where: str, *, mode: str = "validation", closed: bool = False
) -> tuple[Object, Callable[[Json], Any]]:
    """pydantic's schema for a type, without the titles it makes out of names, and what turns JSON into the type.

    In a `closed` one, objects refuse unknown members, which pydantic would drop; unless the model's own configuration
    says what to do with them.
    """
    pydantic: Any = sys.modules["pydantic"]
    base = pydantic.json_schema.GenerateJsonSchema
    changed: dict[str, Any] = {"field_title_should_be_set": lambda self, schema: False}
    if closed:
        changed |= {name: _forbid_unknown(getattr(base, name)) for name in _OBJECTS}
    generator = type("Untitled", (base,), changed)
    try:
        adapter = pydantic.TypeAdapter(kind)
        schema: Object = adapter.json_schema(mode=mode, schema_generator=generator)
    except pydantic.errors.PydanticUserError as error:
        raise SchemaError(f"{where}: {str(error).splitlines()[0]}") from None
    definitions = schema.get("$defs", {})
    for name, part in [(getattr(kind, "__name__", ""), schema), *definitions.items()]:
        if part.get("title") == name:
            del part["title"]
    if schema.keys() == {"$defs", "$ref"}:
        schema = {**definitions[schema["$ref"].removeprefix("#/$defs/")], "$defs": definitions}

    def convert(value: Json) -> Any:
        try:
            return adapter.validate_python(value)
        except pydantic.ValidationError as error:  # a validator of the model said no: the caller's to mend
            problems = error.errors(include_url=False, include_input=False, include_context=False)[:_MAX_ERRORS]
            texts = [f"{'/'.join(map(str, each['loc']))}: {each['msg']}" for each in problems]
            raise Refused(Kind.BAD_ARGUMENTS, "; ".join(texts)) from None

    return schema, convert


def _forbid_unknown(generate: Callable[[Any, Any], Object]) -> Callable[[Any, Any], Object]:
    def closed(self: Any, core: Any) -> Object:
        schema, kind = generate(self, core), core.get("cls")
        config = getattr(kind, "model_config", None) or getattr(kind, "__pydantic_config__", None) or {}
        is_open = config.get("extra") is not None or core.get("root_model")
        if not is_open and schema.get("type") == "object":
            schema.setdefault("additionalProperties", False)
        return schema

    return closed
