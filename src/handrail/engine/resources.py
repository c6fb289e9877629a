"""Resources: static ones and templates, and from what a function returns to the contents of a result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from handrail.engine.catalog import Catalog, ToolEntry, normalize
from handrail.engine.completion import make_completers
from handrail.errors import Kind, Refused, ResourceNotFound, SchemaError
from handrail.guards.policy import Subject, SubjectKind
from handrail.jsonrpc import encode
from handrail.model import EmbeddedResource, Object, Resource, ResourceTemplate, Tool, ToolResult
from handrail.protocol.uri_template import UriTemplate, normalize_uri, uri_problem
from handrail.revisions import Revision
from handrail.schema.compile import compile_schema
from handrail.schema.derive import Invoke
from handrail.schema.jsonable import to_jsonable

MAX_SHOWN_URI_CHARS = 200  # in the text of an error; its data has the whole URI


class ResourceEntry(ToolEntry, kw_only=True):
    """A resource or a template of resources, and what is needed to read it.

    Of a template, `tool.name` is the URI that is read.
    """

    method: ClassVar[str] = "resources/read"
    kind: ClassVar[SubjectKind] = "resource"

    listing: Resource | ResourceTemplate
    template: UriTemplate | None = None
    asked: str = ""  # of a template: the URI as the client wrote it
    ttl_ms: int | UnsetType = UNSET  # how long a client may keep what it read; unset: not at all

    def renamed(self, prefix: str) -> Self:
        return self  # a URI is a name for all servers

    def definition(self, revision: Revision) -> Any:
        return revision.definition(self.listing)

    def encoder_arguments(self, engine: Any, result: ToolResult) -> tuple[Any, ...]:
        is_private = self.hide or engine.guard_set.policy.hides_anything or bool(self.scopes) or self.ttl_ms is UNSET
        return result, self.ttl_ms or 0, "private" if is_private else "public"

    def at(self, uri: str, asked: str) -> Self:
        """Return the entry for one URI of the template, in its canonical form. Rules are about that URI."""
        subject = Subject(kind="resource", name=uri, tags=self.tags, transient=True)
        return replace(self, tool=replace(self.tool, name=uri), subject=subject, label=uri, asked=asked)


def make_resource_entry(
    uri: str, names: Object, schema: Object, invoke: Invoke, complete: Any, **rest: Any
) -> ResourceEntry:
    """Check a definition, and compile everything that a request to read the resource needs of it."""
    where = f"resource {uri!r}"
    template: UriTemplate | None = None
    listing: Resource | ResourceTemplate
    try:
        if "{" in uri or "}" in uri:
            template = UriTemplate(uri)
            listing = normalize(ResourceTemplate(uri_template=uri, **names), where)
        else:
            if problem := uri_problem(uri):
                raise ValueError(problem)
            listing = normalize(Resource(uri=normalize_uri(uri), **names), where)
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
        invoke=_wrap(invoke, mime_type, is_async=rest["mode"] == "async"),
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
            raise SchemaError(
                f"{where}: the function does not take {name!r}; its parameters are the template's variables"
            )
    for name in required:
        if name not in variables:
            raise SchemaError(
                f"{where}: parameter {name!r} is no variable of the URI; write {{{name}}} or give a default"
            )
    if template is not None:
        for name in template.optional & {*required}:
            raise SchemaError(f"{where}: {name!r} may be missing in the URI; give the parameter a default")


def check_overlap(templates: Catalog[ResourceEntry], entry: ResourceEntry) -> None:
    """Refuse a template that matches the same URIs as another one."""
    for each in templates.entries:
        is_same = each.name == entry.name  # which the catalog refuses
        if each.template and entry.template and each.template.shape == entry.template.shape and not is_same:
            text = f"resource {entry.name!r}: {each.name!r} matches the same URIs; remove one of them"
            raise SchemaError(text)


def find_resource(
    resources: Catalog[ResourceEntry], templates: Catalog[ResourceEntry], uri: str
) -> tuple[ResourceEntry, Object] | None:
    """Return the entry that reads a URI, and the variables in it. The template with the most literal text wins."""
    if uri_problem(uri):
        return None
    entry = resources.get(normalize_uri(uri))
    if entry is not None:
        return entry, {}
    best: tuple[int, ResourceEntry, UriTemplate, dict[str, str]] | None = None
    for each in templates:
        if each.template is None or (best is not None and each.template.literal_length <= best[0]):
            continue
        variables = each.template.match(uri)
        if variables is not None:
            best = each.template.literal_length, each, each.template, variables
    if best is None:
        return None
    _, entry, template, variables = best
    return entry.at(template.expand(variables), uri), {**variables}


def unknown_resource(uri: str) -> Refused:
    text = f"Resource not found: {uri}" if len(uri) <= MAX_SHOWN_URI_CHARS else "Resource not found"
    return Refused(Kind.UNKNOWN_RESOURCE, text, {"uri": uri})


def _wrap(invoke: Invoke, mime_type: str | UnsetType, *, is_async: bool) -> Callable[[Object, Any], Any]:
    """Return the function of a resource so that it returns contents."""

    async def read_async(arguments: Object, call: Any) -> ToolResult:
        try:
            value = invoke(arguments, call)
            return to_contents(await value if inspect.isawaitable(value) else value, call.name, mime_type)
        except ResourceNotFound:
            raise unknown_resource(call._state.entry.asked or call.name) from None

    def read(arguments: Object, call: Any) -> ToolResult:
        try:
            return to_contents(invoke(arguments, call), call.name, mime_type)
        except ResourceNotFound:
            raise unknown_resource(call._state.entry.asked or call.name) from None

    return read_async if is_async else read


def to_contents(value: Any, uri: str, mime_type: str | UnsetType = UNSET) -> ToolResult:
    """Return the value of a resource as contents: a text, bytes, JSON, or several of them."""
    if isinstance(value, ToolResult):
        return value
    if value is None:
        raise TypeError(f"resource {uri!r} returned None; raise ResourceNotFound() if there is none of this URI")
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
