"""Resources: static ones and templates, and from what a function returns to the contents of a result."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Self

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from handrail.engine.catalog import Catalog, ToolEntry, normalize
from handrail.engine.completion import make_completers
from handrail.errors import Kind, Refused, SchemaError
from handrail.guards.policy import Subject, SubjectKind
from handrail.jsonrpc import encode
from handrail.model import (
    Audio,
    EmbeddedResource,
    Image,
    Object,
    Resource,
    ResourceLink,
    ResourceTemplate,
    Text,
    Tool,
    ToolResult,
)
from handrail.protocol.uri_template import UriTemplate, normalize_spelling, normalize_uri, uri_problem
from handrail.revisions import Revision
from handrail.schema.compile import compile_schema
from handrail.schema.jsonable import to_jsonable
from handrail.suggest import closest, describe_value

_PLAIN_TYPES = {"string", "integer", "number", "boolean", "null", "enum"}
MAX_SHOWN_URI_CHARS = 200  # in the text of an error; its data has the whole URI


class ResourceEntry(ToolEntry, kw_only=True):
    """A resource or a template of resources, and what is needed to read it.

    Of a template, `tool.name` is the URI that is read.
    """

    method: ClassVar[str] = "resources/read"
    kind: ClassVar[SubjectKind] = "resource"

    listing: Resource | ResourceTemplate
    template: UriTemplate | None = None
    ttl_ms: int | UnsetType = UNSET  # how long a client may keep what it read; unset: not at all

    def renamed(self, prefix: str) -> Self:
        return self  # a URI is a name for all servers

    def definition(self, revision: Revision) -> Any:
        return revision.definition(self.listing)

    def definition_losses(self, revision: Revision) -> list[str]:
        return revision.definition_losses(self.listing)

    def encoder_arguments(self, engine: Any, result: ToolResult) -> tuple[Any, ...]:
        guards = engine.guard_set
        is_same_for_all = not (self.takes_call or self.scopes or self.hide or self.via or engine.middleware)
        is_public = is_same_for_all and self.ttl_ms is not UNSET and not guards.policy.concerns("resource")
        return result, self.ttl_ms or 0, "public" if is_public else "private"

    def at(self, uri: str, requested_uri: str) -> Self:
        """Return the entry for one URI of the template, in its canonical form. Rules are about that URI."""
        subject = Subject(kind="resource", name=uri, tags=self.tags, transient=True)
        return replace(self, tool=replace(self.tool, name=uri), subject=subject, label=uri, requested_uri=requested_uri)


def make_resource_entry(uri: str, names: Object, schema: Object, *, complete: Any = None, **rest: Any) -> ResourceEntry:
    """Check a definition, and compile everything that a request to read the resource needs of it."""
    where = f"resource {uri!r}"
    template: UriTemplate | None = None
    listing: Resource | ResourceTemplate
    try:
        if "{" in uri or "}" in uri:
            template = UriTemplate(uri)
            if "size" in names:
                raise ValueError("size: the resources of a template differ in size; leave it out")
            listing = normalize(ResourceTemplate(uri_template=uri, **names), where)
        else:
            if problem := uri_problem(uri):
                raise ValueError(problem)
            listing = normalize(Resource(uri=normalize_uri(uri), **names), where)
    except SchemaError:
        raise
    except (TypeError, ValueError) as problem:
        raise SchemaError(f"{where}: {problem}") from None
    _check_names(template, schema, where)
    mime_type = names.get("mime_type", UNSET)
    return ResourceEntry(
        tool=Tool(
            name=uri if isinstance(listing, ResourceTemplate) else listing.uri,
            title=listing.title,
            description=listing.description,
            input_schema=schema,
        ),
        listing=listing,
        template=template,
        convert=partial(to_contents, mime_type=mime_type),
        input=compile_schema(schema, where),
        output=None,
        wraps=False,
        dangerous=UNSET,
        complete=make_completers(complete, schema, where),
        **rest,
    )


def _check_names(template: UriTemplate | None, schema: Object, where: str) -> None:
    """Compare the variables of a template with the parameters of its function."""
    variables = () if template is None else template.names
    parameters, required = schema.get("properties", {}), schema.get("required", ())
    for name in variables:
        if name not in parameters:
            near = closest(name, parameters)
            hint = f"did you mean {{{near}}}?" if near else "its parameters are the template's variables"
            raise SchemaError(f"{where}: the function does not take {name!r}; {hint}")
        if not _has_one_spelling(parameters[name], schema.get("$defs", {})):
            text = f"{where}: {name!r}: a value of its type can be written in several ways, and a rule names one URI"
            raise SchemaError(f"{text}; take a str, an int, a float, a bool, a date or an Enum")
    for name in required:
        if name not in variables:
            raise SchemaError(
                f"{where}: parameter {name!r} is no variable of the URI; write {{{name}}} or give a default"
            )
    if template is not None:
        for name in template.optional & {*required}:
            raise SchemaError(f"{where}: {name!r} may be missing in the URI; give the parameter a default")


def _has_one_spelling(schema: Object, definitions: Object) -> bool:
    """Return whether each value is one text; a UUID, a time or a Decimal is several."""
    options = [definitions.get(each.get("$ref", "").rpartition("/")[2], each) for each in schema.get("anyOf", [schema])]
    kinds = {"enum" if "enum" in each or "const" in each else str(each.get("type")) for each in options}
    has_format = any("contentEncoding" in each or each.get("format", "date") != "date" for each in options)
    return kinds <= _PLAIN_TYPES and not kinds >= {"string", "number"} and not has_format


class TemplateCatalog(Catalog[ResourceEntry]):
    """Templates of resources, no two of which match the same URIs."""

    def conflict(self, entry: ResourceEntry) -> str:
        for each in self.entries:
            is_same = each.name == entry.name  # which the catalog refuses
            if each.template and entry.template and each.template.shape == entry.template.shape and not is_same:
                return f"resource {entry.name!r}: {each.name!r} matches the same URIs; remove one of them"
        return super().conflict(entry)


def find_resource(
    resources: Catalog[ResourceEntry], templates: Catalog[ResourceEntry], uri: str
) -> tuple[ResourceEntry, Object] | None:
    """Return the entry that reads a URI, and the variables in it.

    A static one wins, however the URI is written; then the template with the most literal text.
    """
    if uri_problem(uri):
        return None
    name, spelling = normalize_uri(uri), normalize_spelling(uri)
    if not resources.knows(name):
        match = _match_template(templates, spelling)
        if match is None:
            return None
        best, template, variables = match
        canonical = template.expand(variables)
        name = normalize_uri(canonical)
        if not resources.knows(name):
            again = _match_template(templates, normalize_spelling(canonical))
            is_same = again is not None and again[0] is best  # else the spelling went around a closer template
            return (best.at(canonical, uri), {**variables}) if is_same and templates.is_on(best) else None
    entry = resources.get(name)  # None: it is switched off, and no template stands in for it
    return None if entry is None else (entry, {})


def _match_template(
    templates: Catalog[ResourceEntry], spelling: str
) -> tuple[ResourceEntry, UriTemplate, dict[str, str]] | None:
    matches = [
        (each, each.template, variables)
        for each in templates.entries
        if each.template is not None and (variables := each.template.match_normal(spelling)) is not None
    ]
    return max(matches, key=lambda match: match[1].literal_length, default=None)


def unknown_resource(uri: str) -> Refused:
    text = f"Resource not found: {uri}" if len(uri) <= MAX_SHOWN_URI_CHARS else "Resource not found"
    return Refused(Kind.UNKNOWN_RESOURCE, text, {"uri": uri})


def to_contents(value: Any, uri: str, mime_type: str | UnsetType = UNSET) -> ToolResult:
    """Return the value of a resource as contents: a text, bytes, JSON, or several of them."""
    if isinstance(value, ToolResult):
        return value
    if value is None:
        raise TypeError(f"resource {uri!r} returned None; raise ResourceNotFound() if there is none of this URI")
    if isinstance(value, Text | Image | Audio | ResourceLink):
        hint = "return its text, its bytes or EmbeddedResource(…)"
        raise TypeError(f"resource {uri!r} returned {describe_value(value)}, a block of tools and prompts; {hint}")
    if not isinstance(value, list | tuple) or not any(isinstance(each, EmbeddedResource | bytes) for each in value):
        return ToolResult([_content(value, uri, mime_type)])
    for each in value:
        if not isinstance(each, EmbeddedResource | bytes | str):
            raise TypeError(
                f"resource {uri!r}: several contents are EmbeddedResource(…), bytes and texts, not {each!r}"
            )
    return ToolResult([_content(each, uri, mime_type) for each in value])


def _content(value: Any, uri: str, mime_type: str | UnsetType) -> EmbeddedResource:
    if isinstance(value, EmbeddedResource):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return EmbeddedResource({"uri": uri, "mimeType": mime_type or "application/octet-stream", "blob": bytes(value)})
    if isinstance(value, str):
        return EmbeddedResource({"uri": uri, "mimeType": mime_type or "text/plain", "text": str.__str__(value)})
    text = encode(to_jsonable(value)).decode()
    return EmbeddedResource({"uri": uri, "mimeType": mime_type or "application/json", "text": text})
