"""Signatures with pydantic in them: pydantic makes their schema and binds their arguments.

pydantic is never imported here. Whoever uses it in a signature has imported it, so it is found in `sys.modules`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter
from typing import Annotated, Any, get_args

from handrail.errors import Kind, Refused, SchemaError
from handrail.model import Json, Object
from handrail.schema.types import fields_of, is_record

_MAX_ERRORS = 20
_ANNOTATED: Any = Annotated  # of types known only here, which is beyond type checkers


def mentions_pydantic(hints: Iterable[Any], names: Mapping[str, Any], where: str) -> bool:
    """Whether anything of pydantic stands in these hints or defaults, however deep."""
    stack, seen = list(hints) if "pydantic" in sys.modules else [], set()
    while stack:
        hint = stack.pop()
        if id(hint) in seen:
            continue
        seen.add(id(hint))
        kind = hint if isinstance(hint, type) else type(hint)
        if kind.__module__.split(".")[0] == "pydantic" or hasattr(hint, "__pydantic_core_schema__"):
            return True
        stack += [*get_args(hint), *getattr(hint, "__metadata__", ())]
        if is_record(hint):
            stack += [field.hint for field in fields_of(hint, names, where)]
    return False


def arguments_model(
    parameters: list[Parameter], where: str, *, extra: str
) -> tuple[Object, Callable[[Object], Object]]:
    """The input schema of the parameters, and a function that gives validated arguments as pydantic has them."""
    pydantic: Any = sys.modules["pydantic"]
    names = {f"p{i}": each.name for i, each in enumerate(parameters)}
    fields: dict[str, Any] = {}
    for field, each in zip(names, parameters, strict=True):
        # The parameter's name is the alias: as a field's name it might hide a method of the model.
        hint = Any if each.annotation is Parameter.empty else each.annotation
        named = _ANNOTATED[hint, pydantic.Field(alias=each.name)]
        fields[field] = (named, ... if each.default is Parameter.empty else each.default)
    model = pydantic.create_model("Arguments", __config__={"extra": extra}, **fields)
    schema = schema_of(model, where, mode="validation")
    if extra == "allow":
        schema.pop("additionalProperties", None)
    validate = adapter(model)

    def bind(arguments: Object) -> Object:
        bound = validate(arguments)
        return {name: getattr(bound, field) for field, name in names.items()} | (bound.model_extra or {})

    return schema, bind


def adapter(kind: Any) -> Callable[[Json], Any]:
    """A function from a JSON value to the type; a validator of the model that says no is the caller's to mend."""
    pydantic: Any = sys.modules["pydantic"]
    validate = pydantic.TypeAdapter(kind).validate_python

    def convert(value: Json) -> Any:
        try:
            return validate(value)
        except pydantic.ValidationError as error:
            problems = error.errors(include_url=False, include_input=False, include_context=False)[:_MAX_ERRORS]
            texts = [f"{'/'.join(map(str, each['loc']))}: {each['msg']}" for each in problems]
            raise Refused(Kind.BAD_ARGUMENTS, "; ".join(texts)) from None

    return convert


def schema_of(kind: Any, where: str, *, mode: str) -> Object:
    """pydantic's schema for a type, without the titles it makes out of names."""
    pydantic: Any = sys.modules["pydantic"]
    base = pydantic.json_schema.GenerateJsonSchema
    generator = type("Untitled", (base,), {"field_title_should_be_set": lambda self, schema: False})
    try:
        schema: Object = pydantic.TypeAdapter(kind).json_schema(mode=mode, schema_generator=generator)
    except pydantic.errors.PydanticUserError as error:
        raise SchemaError(f"{where}: {str(error).splitlines()[0]}") from None
    for name, part in [(getattr(kind, "__name__", ""), schema), *schema.get("$defs", {}).items()]:
        if part.get("title") == name:
            del part["title"]
    if schema.keys() == {"$defs", "$ref"}:
        schema = {**schema["$defs"][schema["$ref"].removeprefix("#/$defs/")], "$defs": schema["$defs"]}
    return schema
