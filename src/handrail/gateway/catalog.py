"""What an upstream server lists, as entries of our catalogs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Literal, Protocol

from msgspec import Struct

from handrail.client.tools import ListedEntries, ListedEntry, ListedTool
from handrail.engine.call import Call
from handrail.engine.catalog import ToolEntry
from handrail.engine.completion import RequestPeer
from handrail.engine.core import Engine
from handrail.errors import SchemaError
from handrail.gateway.entries import prompt_entry, resource_entry, tool_entry, tool_name
from handrail.gateway.questions import CapabilityKey
from handrail.gateway.settings import Terms, short_name
from handrail.gateway.trust import Pins, Verdict, propose_class
from handrail.guards.tool_definitions import Change
from handrail.jsonrpc import encode_sorted
from handrail.model import Object, ToolResult
from handrail.revisions import Revision

__all__ = ["METHODS", "UpstreamCatalog", "UpstreamTool", "ViewKey"]

log = logging.getLogger("handrail")

METHODS = ("tools/list", "resources/list", "resources/templates/list", "prompts/list")
_LISTS_OF = {
    "tool": ("tools/list",),
    "resource": ("resources/list", "resources/templates/list"),
    "prompt": ("prompts/list",),
}
POSITIONS = 1 << 32  # of one upstream: entries stand in the order of the configuration

ViewKey = tuple[str, CapabilityKey]
"""An owner and its capabilities: what an upstream lists may differ by both."""
Lists = Mapping[str, ListedEntries[Any] | None]
"""What an upstream lists, by method; None where it has no such list."""
Made = dict[str, tuple[bytes, Callable[[], ToolEntry]]]
"""By own name, what tells an entry from an earlier one, and what makes it."""


class UpstreamTool(Struct):
    """A tool as the upstream lists it, with what became of it here."""

    own_name: str
    name: str
    raw: Object
    proposal: str  # of a class; it decides nothing
    accepted: str  # the class that a person has accepted; empty for none
    state: Literal["listed", "new", "quarantined", "denied", "refused"]
    reason: str = ""  # why it is not offered
    changes: tuple[Change, ...] = ()


class Caller(Protocol):
    """What sends the calls of entries to the upstream."""

    on_change: Callable[[], None]

    async def send(
        self, method: str, params: Object, call: Call, tool: ListedTool | None, uri: str = ""
    ) -> ToolResult: ...

    def complete(
        self, reference: Object, argument: str, value: str, context: Mapping[str, str], peer: RequestPeer
    ) -> Coroutine[Any, Any, list[str]]: ...


class UpstreamCatalog:
    """The entries of one upstream. What it lists may differ by caller: each has a view.

    `index` is the place of the upstream in the configuration, `owner` the server it is included in.
    """

    def __init__(self, engine: Engine, owner: Any, terms: Terms, pins: Pins, index: int, caller: Caller) -> None:
        self.tools: list[UpstreamTool] = []
        self.index = index
        self.revision = ""
        self._engine = engine
        self._owner = owner
        self._terms = terms
        self._pins = pins
        self._caller = caller
        self._lists: dict[ViewKey, Lists] = {}  # as they came last
        self._names: dict[ViewKey, dict[str, frozenset[str]]] = {}  # the upstream's own, by view and method
        self._entries: dict[str, dict[str, tuple[bytes, ToolEntry]]] = {method: {} for method in METHODS}
        self._views_of: dict[str, dict[str, set[ViewKey]]] = {method: {} for method in METHODS}
        self._counted: set[str] = set()  # revisions whose losses of definitions are counted

    def apply(self, key: ViewKey, lists: Lists, revision: str) -> list[str]:
        """Make the catalogs show what the upstream lists now; return why some entries are not added."""
        self._lists[key], self.revision = lists, revision
        problems: list[str] = []
        for method, listed in lists.items():
            entries = [] if listed is None else [*listed]
            if method == "tools/list":
                specified = self._tool_entries(entries, {} if listed is None else listed.refused)
            else:
                specified = self._other_entries(method, entries)
            problems += self._exchange(method, key, specified)
        self._counted.clear()
        self._caller.on_change()
        return problems

    def accept(self, classes: Mapping[str, str]) -> None:
        """Pin these tools, by their own names, as they are listed now, with the classes a person has accepted."""
        definitions = {each.own_name: each.raw for each in self.tools if each.own_name in classes and each.raw}
        self._pins.accept(definitions, {name: classes[name] for name in definitions}, self.revision)
        self.judge_again()

    def judge_again(self) -> None:
        """Apply what a person has accepted, or no longer accepts, to the lists as they came last."""
        for key, lists in self._lists.items():
            self.apply(key, lists, self.revision)

    def hidden(self, method: str, key: ViewKey) -> frozenset[str]:
        """Return the names of our entries that the upstream does not show to a caller."""
        visible = self._names.get(key, {}).get(method, ())  # without a view, nothing: it may be another's
        entries = self._entries[method].items()
        return frozenset(entry.name for own_name, (_, entry) in entries if own_name not in visible)

    def shows(self, entry: ToolEntry, key: ViewKey) -> bool:
        """Return whether the upstream lists what this entry is about for a caller."""
        view = self._names.get(key)
        return view is not None and any(entry.own_name in view.get(method, ()) for method in _LISTS_OF[entry.kind])

    def new_losses(self, revision: Revision) -> list[str]:
        """Return, once for each change of the list, what the definitions of tools lose in a revision."""
        if revision.name in self._counted:
            return []
        self._counted.add(revision.name)
        entries = self._entries["tools/list"].values()
        return [case for _, entry in entries for case in revision.definition_losses(entry.tool)]

    def forget(self, key: ViewKey) -> None:
        """Take away what only this view shows."""
        self.apply(key, dict.fromkeys(METHODS), self.revision)
        del self._lists[key], self._names[key]

    def withdraw(self) -> None:
        """Take its entries out of the catalogs."""
        for method, entries in self._entries.items():
            withdrawn = [entry for _, entry in entries.values()]
            self._engine.catalogs[method].exchange(withdrawn, ())
            self._set_limits(method, withdrawn)
            entries.clear()
        self._lists.clear()
        self._names.clear()

    def _tool_entries(self, listed: list[ListedTool], refused: Mapping[str, str]) -> Made:
        offered = [each for each in listed if self._terms.is_offered(each.own_name)]
        verdicts = self._pins.judge({each.own_name: each.raw for each in offered}, self.revision)
        tools: list[UpstreamTool] = []
        specified: Made = {}
        for each in listed:
            own_name = each.own_name
            name = tool_name(self._terms, own_name)
            verdict = verdicts.get(own_name, Verdict("listed"))
            tool = UpstreamTool(
                own_name, name, each.raw, propose_class(each.raw), verdict.accepted, verdict.state, verdict.withheld
            )
            tool.changes = verdict.changes
            tools.append(tool)
            if own_name not in verdicts:
                tool.state, tool.reason = "denied", "the configuration does not offer it"
                continue
            send = partial(self._call_tool, each)
            make = partial(tool_entry, each, name, self._terms, verdict, self._owner, send)
            stamp = encode_sorted([each.raw, verdict.accepted, verdict.withheld])
            specified[own_name] = stamp, partial(self._checked, make, tool)
        tools += [
            UpstreamTool(name, tool_name(self._terms, name), {}, "destroys", "", "refused", reason)
            for name, reason in refused.items()
        ]
        self.tools = tools
        return specified

    def _checked(self, make: Callable[[], ToolEntry], tool: UpstreamTool) -> ToolEntry:
        try:
            return make()
        except SchemaError as problem:
            tool.state, tool.reason = "refused", str(problem)
            raise

    def _other_entries(self, method: str, listed: list[ListedEntry]) -> Made:
        specified: Made = {}
        for each in listed:
            is_prompt = method == "prompts/list"
            reference: Object = {"type": "ref/prompt", "name": each.own_name}
            if not is_prompt:
                reference = {"type": "ref/resource", "uri": each.own_name}
            complete = partial(self._caller.complete, reference)
            make: Callable[[], ToolEntry]
            if is_prompt:
                make = partial(prompt_entry, each, self._terms, self._owner, partial(self._get_prompt, each), complete)
            else:
                make = partial(resource_entry, each, self._terms, self._owner, self._read, complete)
            specified[each.own_name] = encode_sorted(each.raw), make
        return specified

    def _exchange(
        self,
        method: str,
        key: ViewKey,
        specified: Made,
    ) -> list[str]:
        """Add and remove the entries of one list; those that other views still show stay."""
        entries, views = self._entries[method], self._views_of[method]
        gone: list[ToolEntry] = []
        added: list[ToolEntry] = []
        for place, (own_name, (stamp, make)) in enumerate(specified.items()):
            current = entries.get(own_name)
            if current is None or current[0] != stamp:
                try:
                    entry = make()
                except (SchemaError, ValueError, TypeError) as problem:  # one bad definition does not hide the others
                    log.warning("gateway: %s: %.100s left out: %s", self._terms.name, own_name, problem)
                    if current is not None:
                        gone.append(current[1])
                        del entries[own_name]
                    continue
                if current is not None:
                    gone.append(current[1])
                entry.own_name = own_name
                entry.position = (self.index + 1) * POSITIONS + place
                entries[own_name] = stamp, entry
                added.append(entry)
            views.setdefault(own_name, set()).add(key)
        for own_name in [each for each in views if each not in specified]:
            views[own_name].discard(key)
            if not views[own_name]:
                del views[own_name]
                if (current := entries.pop(own_name, None)) is not None:
                    gone.append(current[1])
        present = {each.name for each in self._engine.catalogs[method].entries}
        again = [each for _, each in entries.values() if each.name not in present and each not in added]
        added += again  # names that another upstream had, and has no longer
        problems = self._add(method, gone, added) if gone or added else []
        self._names.setdefault(key, {})[method] = frozenset(specified) & entries.keys()
        return problems

    def _add(self, method: str, gone: list[ToolEntry], added: list[ToolEntry]) -> list[str]:
        """Exchange entries. A name that is taken goes to what stands first in the configuration, not to the first."""
        catalog = self._engine.catalogs[method]
        by_name = {each.name: each for each in catalog.entries if each not in gone}
        renamed: list[tuple[ToolEntry, str]] = []
        for entry in added:
            other = by_name.setdefault(entry.name, entry)
            if other is entry:
                continue
            is_first = bool(other.upstream) and entry.position < other.position
            if is_first:
                gone.append(other)
            if self._terms.collide == "suffix" and entry.kind != "resource":
                number = next(n for n in range(2, 10_000) if f"{entry.name}_{n}" not in by_name)
                name = short_name(f"{entry.name}_{number}")
                by_name[name] = other if is_first else entry
                renamed.append((by_name[name], name))
        later = [each for each, _ in renamed]
        problems = catalog.exchange(gone, [each for each in added if each not in later], in_place=True)
        for each, name in renamed:
            each.rename(name)
        problems += catalog.exchange((), later, in_place=True) if later else []
        self._set_limits(method, [*gone, *added])
        for problem in problems:
            log.warning("gateway: %s: %s", self._terms.name, problem)
        if problems:
            present = {each.name: each for each in catalog.entries}
            names = {entry.name for entry in added if present.get(entry.name) is not entry}
            for tool in self.tools if method == "tools/list" else ():
                if tool.name in names:
                    tool.state, tool.reason = "refused", "another server has a tool of this name; give a prefix"
        return problems

    def _set_limits(self, method: str, changed: list[ToolEntry]) -> None:
        """Have calls counted by the limits of the upstream that has a name now."""
        guards, catalog = self._engine.guard_set, self._engine.catalogs[method]
        for each in changed:
            entry = catalog.entry(each.name)
            limits = None if entry is None else guards.upstream_limits.get(entry.upstream)
            if entry is None or limits is None:
                guards.limit_entry(each.limit_name, None)
            else:
                own_name = entry.own_name if entry.kind == "tool" else None
                guards.limit_entry(entry.limit_name, limits.limit_of(entry.upstream, own_name))

    def _call_tool(self, listed: ListedTool, arguments: Object, call: Call) -> Any:
        return self._caller.send("tools/call", {"name": listed.own_name, "arguments": arguments}, call, listed)

    def _get_prompt(self, listed: ListedEntry, arguments: Object, call: Call) -> Any:
        return self._caller.send("prompts/get", {"name": listed.own_name, "arguments": arguments}, call, None)

    def _read(self, arguments: Object, call: Call) -> Any:
        entry = call._state.entry
        uri = entry.requested_uri or entry.listing.uri  # type: ignore[attr-defined]
        return self._caller.send("resources/read", {"uri": uri}, call, None, uri)
