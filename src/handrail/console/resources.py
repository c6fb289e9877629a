"""The resources and prompts of a server as one caller sees them, with the reason for each that is hidden."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import to_builtins

from handrail.console import tools
from handrail.console.access import ApiRequest
from handrail.console.context import ConsoleContext
from handrail.engine.prompts import PromptEntry
from handrail.engine.resources import ResourceEntry
from handrail.model import Json, Object, ResourceTemplate
from handrail.text.controls import confusable_names

__all__ = ["view"]


async def view(context: ConsoleContext, request: ApiRequest) -> Object:
    totals, methods = await tools.collect_tallies(context), tools.lists_of(request)
    viewer = tools.viewer_of(context, request, totals)
    rows = (row for method in methods for row in _rows(context, viewer, method, totals))
    return {**tools.viewer_members(context, viewer, totals), "entries": list(rows)}


def _rows(context: ConsoleContext, viewer: tools.Viewer, method: str, totals: tools.WorkerTally) -> Iterator[Json]:
    entries: list[ResourceEntry | PromptEntry] = context.engine.catalogs[method].entries
    is_offered = bool(entries) and method in viewer.revision.requests
    responses = tools.list_responses(context, viewer, method) if is_offered else []
    raw_entries = tools.listed_entries(responses, method)
    listed = {each.get("uri", each.get("uriTemplate", each["name"])) for each in raw_entries}
    look_alike_names = dict(confusable_names(entry.name for entry in entries))
    for entry in entries:
        listing = entry.listing
        members: Object = {
            **tools.entry_members(context, viewer, method, entry, entry.name in listed, totals),
            "kind": "template" if isinstance(listing, ResourceTemplate) else entry.kind,
            "own_name": listing.name,
            "completes": sorted(entry.complete),
            "warnings": list(tools.warnings_of(entry, look_alike_names, "")),
        }
        if (
            isinstance(entry, ResourceEntry) and entry.template is not None
        ):  # a URI has to have what a default could give
            required = [each for each in entry.template.names if each not in entry.template.optional]
            members["input_schema"] = {**members["input_schema"], "required": required}
        about = to_builtins(listing)
        members |= {name: about[name] for name in ("mimeType", "size", "annotations") if name in about}
        yield context.redactor.definition(members)
