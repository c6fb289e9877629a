"""What an upstream server lists, as entries of our catalogs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from itertools import chain, count
from typing import Any, Literal, Protocol

from msgspec import Struct

from handrail.client.tools import ListedEntries, ListedEntry, ListedTool
from handrail.engine.call import Call
from handrail.engine.catalog import ToolEntry
from handrail.engine.completion import RequestPeer
from handrail.engine.core import LIST_CHANGED, Engine
from handrail.engine.guard_set import owner_of
from handrail.errors import SchemaError
from handrail.gateway.entries import prompt_entry, resource_entry, tool_entry, tool_name
from handrail.gateway.questions import CapabilityKey
from handrail.gateway.session import principal_of
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
PLACES = 1 << 16  # of one place in its lists: several views may have something there

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


class _Variant(Struct, eq=False):
    """An entry as some views have it."""

    entry: ToolEntry
    views: set[ViewKey]


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

    Views that have the same definition share an entry. Of several definitions of one name, the first stands in the
    catalog of the engine; callers with another one have a variant in its place. `index` is the place of the upstream in
    the configuration, `owner` the server it is included in.
    """

    def __init__(self, engine: Engine, owner: Any, terms: Terms, pins: Pins, index: int, caller: Caller) -> None:
        self.index = index
        self.revision = ""
        self._engine = engine
        self._owner = owner
        self._terms = terms
        self._pins = pins
        self._caller = caller
        self._lists: dict[ViewKey, Lists] = {}  # as they came last
        self._own: dict[ViewKey, dict[str, dict[str, ToolEntry]]] = {}  # by view, method and own name
        self._variants: dict[str, dict[str, dict[bytes, _Variant]]] = {method: {} for method in METHODS}
        self._tools: dict[ViewKey, list[UpstreamTool]] = {}
        self._all_tools: list[UpstreamTool] | None = []
        self._numbers = count()
        self._counted: dict[tuple[str, str], Counter[str]] = {}  # losses of definitions, by revision and method

    @property
    def tools(self) -> list[UpstreamTool]:
        """The tools of all views; of one that differs by view, a form that needs a look."""
        if self._all_tools is None:
            tools: dict[str, UpstreamTool] = {}
            for each in chain.from_iterable(self._tools.values()):
                if tools.setdefault(each.own_name, each).state == "listed" and each.state != "listed":
                    tools[each.own_name] = each
            self._all_tools = [*tools.values()]
        return self._all_tools

    def apply(self, key: ViewKey, lists: Lists, revision: str) -> list[str]:
        """Make the catalogs show what the upstream lists now; return why some entries are not added."""
        return [] if revision == self.revision and self._is_applied(key, lists) else self._apply(key, lists, revision)

    def _is_applied(self, key: ViewKey, lists: Lists) -> bool:
        """Return whether a view lists what it did before, and no other upstream has left a name of this one."""
        before = self._lists.get(key)
        if before is None or before.keys() != lists.keys() or not all(map(_are_equal, before.values(), lists.values())):
            return False
        catalogs, variants = self._engine.catalogs, self._variants
        names = ((method, self._first(method, each).name) for method in METHODS for each in variants[method])
        return all(catalogs[method].entry(name) is not None for method, name in names)

    def _apply(self, key: ViewKey, lists: Lists, revision: str) -> list[str]:
        self._lists[key], self.revision = lists, revision
        problems: list[str] = []
        for method, listed in lists.items():
            entries = [] if listed is None else [*listed]
            if method == "tools/list":
                specified = self._tool_entries(key, entries, {} if listed is None else listed.refused)
            else:
                specified = self._other_entries(method, entries)
            problems += self._exchange(method, key, specified)
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
            self._apply(key, lists, self.revision)

    def hidden(self, method: str, key: ViewKey) -> frozenset[str]:
        """Return the names of our entries that the upstream does not show to a caller."""
        own = self._own.get(key, {}).get(method, {})  # without a view, nothing: it may be another's
        entry_of = self._engine.catalogs[method].entry
        firsts = (self._first(method, own_name) for own_name in self._variants[method] if own_name not in own)
        return frozenset(first.name for first in firsts if entry_of(first.name) is first)

    def variants(self, method: str, key: ViewKey) -> list[ToolEntry]:
        """Return the entries that a caller has in place of those in the catalog."""
        own = self._own.get(key, {}).get(method, {})
        entry_of = self._engine.catalogs[method].entry
        firsts = ((entry, self._first(method, own_name)) for own_name, entry in own.items())
        return [
            _in_place_of(first, entry)
            for entry, first in firsts
            if entry is not first and entry_of(first.name) is first
        ]

    def own_entry(self, entry: ToolEntry, key: ViewKey) -> ToolEntry | None:
        """Return what a caller has in place of an entry; None if the upstream does not list it for that caller."""
        view = self._own.get(key)
        if view is not None:
            for method in _LISTS_OF[entry.kind]:
                own = view[method].get(entry.own_name)
                if own is not None:  # the entry of a resource may be a copy, made for one URI
                    return entry if own is entry or entry.kind == "resource" else _in_place_of(entry, own)
        return None

    def _first(self, method: str, own_name: str) -> ToolEntry:
        """Return the entry of a name that stands in the catalog of the engine."""
        return next(iter(self._variants[method][own_name].values())).entry

    def new_losses(self, method: str, revision: Revision) -> Counter[str]:
        """Return, once for each change of the list, what its definitions lose in a revision."""
        if (revision.name, method) in self._counted:
            return Counter()
        firsts = (self._first(method, each) for each in self._variants[method])
        losses = Counter(case for entry in firsts for case in entry.definition_losses(revision))
        self._counted[revision.name, method] = losses
        return losses

    @property
    def losses(self) -> dict[str, Counter[str]]:
        """How many definitions lose what, by the revision of the callers that have listed them as they are now."""
        losses: dict[str, Counter[str]] = {}
        for (revision, _), counted in self._counted.items():
            losses.setdefault(revision, Counter()).update(counted)
        return {revision: counted for revision, counted in losses.items() if counted}

    def forget(self, key: ViewKey) -> None:
        """Take away what only this view shows."""
        self._apply(key, dict.fromkeys(METHODS), self.revision)
        del self._lists[key], self._own[key], self._tools[key]

    def withdraw(self) -> None:
        """Take its entries out of the catalogs."""
        for method, variants in self._variants.items():
            withdrawn = [self._first(method, each) for each in variants]
            self._engine.catalogs[method].exchange(withdrawn, ())
            self._set_limits(method, withdrawn)
            variants.clear()
        for each in (self._lists, self._own, self._tools):
            each.clear()
        self._all_tools = None

    def _tool_entries(self, key: ViewKey, listed: list[ListedTool], refused: Mapping[str, str]) -> Made:
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
        self._tools[key], self._all_tools = tools, None
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

    def _exchange(self, method: str, key: ViewKey, specified: Made) -> list[str]:
        """Add and remove the entries of one list; those that other views still show stay."""
        variants, own = self._variants[method], dict[str, ToolEntry]()
        before = self._own.setdefault(key, {}).get(method)
        left = {} if before is None else before
        firsts = {each: self._first(method, each) for each in {**specified, **left} if each in variants}
        for place, (own_name, (stamp, make)) in enumerate(specified.items()):
            variant = variants.get(own_name, {}).get(stamp)
            if variant is None:
                try:
                    entry = make()
                except (SchemaError, ValueError, TypeError) as problem:  # one bad definition does not hide the others
                    log.warning("gateway: %s: %.100s left out: %s", self._terms.name, own_name, problem)
                    continue
                entry.own_name = own_name
                entry.position = (self.index + 1) * POSITIONS + place * PLACES + next(self._numbers) % PLACES
                variant = variants.setdefault(own_name, {})[stamp] = _Variant(entry, set())
            variant.views.add(key)
            own[own_name] = variant.entry
        for own_name, entry in left.items():
            if own.get(own_name) is not entry:
                self._leave(variants, own_name, entry, key)
        self._own[key][method] = own
        nows = {each: self._first(method, each) for each in {**own, **firsts} if each in variants}
        gone = [entry for own_name, entry in firsts.items() if nows.get(own_name) is not entry]
        added = [entry for own_name, entry in nows.items() if firsts.get(own_name) is not entry]
        entry_of, new = self._engine.catalogs[method].entry, set(added)
        all_firsts = [self._first(method, each) for each in variants]
        # Names that another upstream had, and has no longer.
        added += [each for each in all_firsts if entry_of(each.name) is None and each not in new]
        if gone or added:
            self._counted = {each: losses for each, losses in self._counted.items() if each[1] != method}
            return self._add(method, gone, added, principal_of(key[0]))
        if before is not None and own != before:  # the catalog is as it was, and tells no one
            self.tell_owner(method, key[0])
        return []

    @staticmethod
    def _leave(variants: dict[str, dict[bytes, _Variant]], own_name: str, entry: ToolEntry, key: ViewKey) -> None:
        """Drop an entry that the view had, unless others have it too."""
        for stamp, variant in [*variants[own_name].items()]:
            if variant.entry is entry:
                variant.views.discard(key)
                if not variant.views:
                    del variants[own_name][stamp]
        if not variants[own_name]:
            del variants[own_name]

    def tell_owner(self, method: str, owner: str) -> None:
        """Announce a change of a list to the one whose list it is."""
        for stream in list(self._engine.open_streams):
            if owner_of(stream.principal, stream.address) == principal_of(owner):
                stream.list_changed(LIST_CHANGED[method.partition("/")[0]])

    def _add(self, method: str, gone: list[ToolEntry], added: list[ToolEntry], owner: str) -> list[str]:
        """Exchange entries. A name that is taken goes to what stands first in the configuration, not to the first.

        A change that is about one owner's list is announced to that owner: the others do not see these entries.
        """
        catalog = self._engine.catalogs[method]
        leaving = set(gone)
        by_name = {each.name: each for each in catalog.entries if each not in leaving}
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
        later = {each: None for each, _ in renamed}
        is_of_others = bool(renamed) or any(each.upstream != self._terms.name for each in gone)
        self._engine.changing_for = "" if is_of_others else owner
        try:
            problems = catalog.exchange(gone, [each for each in added if each not in later], in_place=True)
            for each, name in renamed:
                each.rename(name)
            problems += catalog.exchange((), later, in_place=True) if later else []
        finally:
            self._engine.changing_for = ""
        self._set_limits(method, [*gone, *added])
        for problem in problems:
            log.warning("gateway: %s: %s", self._terms.name, problem)
        if problems:
            present = {each.name: each for each in catalog.entries}
            names = {entry.name for entry in added if present.get(entry.name) is not entry}
            for tool in chain.from_iterable(self._tools.values()) if method == "tools/list" else ():
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


def _in_place_of(entry: ToolEntry, variant: ToolEntry) -> ToolEntry:
    """Return a variant with the name and the place that its name has in the catalog."""
    if variant.name != entry.name or variant.position != entry.position or not variant.label:
        variant.rename(entry.name)
        variant.position = entry.position
        variant.prepare()
    return variant


def _are_equal(one: ListedEntries[Any] | None, other: ListedEntries[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.refused == other.refused and [each.raw for each in one] == [each.raw for each in other]
