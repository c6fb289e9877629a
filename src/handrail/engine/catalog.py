"""What a server lists: add, find, page, watch. A tool is compiled when it is added; a page is encoded once."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar

from msgspec import UNSET, MsgspecError, Raw, Struct, UnsetType, to_builtins
from msgspec.json import decode
from msgspec.structs import replace

from handrail.errors import Kind, Refused, SchemaError
from handrail.guards.policy import Subject, SubjectKind, hints
from handrail.guards.tool_definitions import fingerprint
from handrail.jsonrpc import encode
from handrail.model import Json, Object, Tool, ToolResult, check_members
from handrail.revisions import Revision
from handrail.schema.compile import Checker, compile_schema, sensitive_properties
from handrail.schema.derive import Invoke
from handrail.schema.jsonable import NotJson, to_jsonable
from handrail.suggest import closest, describe_value, expect

if TYPE_CHECKING:
    from handrail.engine.completion import Completer

log = logging.getLogger("handrail")

D = TypeVar("D", bound=Struct)

MAX_PAGES = 10_000  # encoded pages in memory

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_HINTS = ("title", "readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")
HINTS = {
    "read_only": "readOnlyHint",
    "destructive": "destructiveHint",
    "idempotent": "idempotentHint",
    "open_world": "openWorldHint",
}
"""Options of a tool, and the member of `annotations` that each of them sets."""
_VENDOR = re.compile(r"x-.|.*[./]", re.IGNORECASE | re.DOTALL)


class Preview(Struct, frozen=True):
    """A function that describes what a call would do. It takes the tool's arguments, or some of them."""

    function: Callable[..., Any]
    bind: Invoke  # returns the arguments as the tool would get them, by name
    names: frozenset[str]  # that the function takes
    call: str  # its parameter for the call, if it has one

    def invoke(self, call: Any) -> Any:
        bound = self.bind(call.arguments, call)
        keywords = {name: value for name, value in bound.items() if name in self.names}
        return self.function(**keywords, **({self.call: call} if self.call else {}))


class ToolEntry(Struct, kw_only=True, eq=False):
    """A tool, and what is needed to run it. Resources and prompts are entries of the same form."""

    method: ClassVar[str] = "tools/call"
    kind: ClassVar[SubjectKind] = "tool"
    prefix: ClassVar[str] = ""  # of its label

    tool: Tool  # of a resource or a prompt: what guards, approvals and the audit log see of it
    invoke: Callable[[Object, Any], Any]
    mode: Literal["async", "inline", "thread"]
    input: Checker
    output: Checker | None
    wraps: bool  # older revisions wrap its output, and the schema of that, in the member `result`
    idle: float
    total: float
    dangerous: str | UnsetType
    tags: frozenset[str]
    scopes: frozenset[str] = frozenset()  # that a caller needs
    hide: bool = False  # from callers without them
    owner: Any  # the server it was registered with: its state is what the call sees
    enabled: bool = True
    position: int = 0
    origin: ToolEntry | None = None
    via: tuple[Any, ...] = ()  # the servers that brought it here; their middleware is around it too
    subject: Subject = Subject(kind="tool", name="")  # what policy rules match
    fingerprint: str = ""
    source: str = ""  # the file its function is in
    preview: Preview | None = None  # describes what a call would do
    trusted_output: bool = False  # a built-in tool whose results were sanitized before
    label: str = ""  # the name in approvals and in the audit log; differs from the names of other kinds
    limit_name: str = ""  # the same for rate limits and figures; that of a template, not of each URI
    limited_as: str = ""  # another entry, whose limits and figures these are
    complete: Mapping[str, Completer] = {}  # by argument
    convert: Callable[[Any, str], ToolResult] | None = None  # from the function's value and the name to a result
    takes_call: bool = False  # the function sees who calls
    requested_uri: str = ""  # of a resource of a template: as the client wrote it
    upstream: str = ""  # the name of the upstream server it comes from; empty: this server's own
    own_name: str = ""  # how that server calls it
    trusted: bool = True  # its hints are believed
    hints: Object | None = None  # what a person has accepted in place of its own hints
    withheld: str = ""  # why it is neither listed nor run
    asks: bool = False  # a person may have to be asked, whatever the rules say

    @property
    def name(self) -> str:
        return self.tool.name

    def encoder_arguments(self, engine: Any, result: ToolResult) -> tuple[Any, ...]:
        """Return what the encoder of the method takes."""
        return result, self.wraps

    def renamed(self, prefix: str) -> Self:
        """Return the entry for a server that includes it under a prefix."""
        return replace(self, tool=replace(self.tool, name=prefix + self.tool.name))

    def rename(self, name: str) -> None:
        """Give the entry another name, before it is added."""
        self.tool = replace(self.tool, name=name)

    def is_visible_to(self, scopes: frozenset[str]) -> bool:
        return not self.hide or self.scopes <= scopes

    def prepare(self) -> None:
        """Compute what follows from the definition, which may have been renamed since it was compiled."""
        own = {} if self.tool.annotations is UNSET else self.tool.annotations
        self.subject = Subject(
            self.kind, self.tool.name, self.tags, own if self.hints is None else self.hints, self.trusted, self.upstream
        )
        self.asks = hints(self.subject).get("destructiveHint") is True and self.kind == "tool"
        self.label = self.prefix + self.tool.name
        self.limit_name = self.limited_as or self.label
        # An approval is good for its kind only.
        tool = self.tool if self.kind == "tool" else replace(self.tool, annotations={"kind": self.kind})
        self.fingerprint = fingerprint(tool)

    def definition(self, revision: Revision) -> Any:
        """Return the tool as a revision lists it."""
        return revision.tool(self.tool)

    def definition_losses(self, revision: Revision) -> list[str]:
        """Return what of its definition a revision cannot express."""
        return revision.definition_losses(self.tool)

    def bad_arguments(self, arguments: Object) -> Refused:
        spelled = arguments if self.kind == "tool" else _spelled_values(arguments, self.tool.input_schema)
        problems = self.input.problems(spelled) or self.input.problems(arguments)
        return Refused(
            Kind.BAD_ARGUMENTS,
            "; ".join(each.text for each in problems),
            {"errors": [{"path": each.path, "keyword": each.keyword, "message": each.text} for each in problems]},
            prefix=f"Invalid arguments for {self.kind} {self.tool.name}: ",
        )


def _spelled_values(texts: Object, schema: Object) -> Object:
    """Return texts as the numbers and truth values that they spell, where the schema wants no text."""
    values: Object = {}
    for name, text in texts.items():
        value = text
        if schema.get("properties", {}).get(name, {}).get("type") in ("integer", "number", "boolean"):
            with suppress(MsgspecError):
                value = decode(text)
        values[name] = value
    return values


def make_entry(tool: Tool, **rest: Any) -> ToolEntry:
    """Check a definition, and compile everything that a call needs of it."""
    where = f"tool {tool.name!r}"
    if not tool.name or not isinstance(tool.name, str):
        raise SchemaError(f"{where}: a name is a text of 1 to 128 characters")
    if not _NAME.fullmatch(tool.name):
        log.warning("%s: names should have 1 to 128 characters of A-Z a-z 0-9 _ - .", where)
    tool = normalize(tool, where)
    _check_annotations({} if tool.annotations is UNSET else tool.annotations, where)
    output, wraps = None, False
    if tool.output_schema is not UNSET:
        output = compile_schema(tool.output_schema, f"{where}: output_schema", any_root=True, formats=False)
        wraps = tool.output_schema.get("type") != "object"
    checker = compile_schema(tool.input_schema, f"{where}: input_schema")
    for name in sensitive_properties(checker.headers):
        log.warning("%s: %s looks like a secret and is mirrored into an HTTP header", where, name)
    return ToolEntry(tool=tool, input=checker, output=output, wraps=wraps, **rest)


def normalize(definition: D, where: str) -> D:
    """Return the definition with its listed parts as strict JSON: one bad entry would break the whole list."""
    own: dict[str, Any] = {}
    for name in {"annotations", "icons", "meta"} & {*definition.__struct_fields__}:
        value = getattr(definition, name)
        try:
            own[name] = value if value is UNSET else decode(encode(to_jsonable(value)))
        except NotJson as problem:
            raise SchemaError(f"{where}: {name}: {problem}") from None
    members = {name: getattr(definition, name, UNSET) for name in ("title", "description", "mime_type", "size")}
    try:  # the annotations of tools are others
        check_members(f"{where}: ", members if isinstance(definition, Tool) else members | own)
    except ValueError as problem:
        raise SchemaError(str(problem)) from None
    for icon in own["icons"] if own["icons"] is not UNSET else ():
        source = icon.get("src") if isinstance(icon, dict) else None
        if not isinstance(source, str) or not source.startswith(("https://", "data:")):
            raise SchemaError(f"{where}: icons: src must be an https: or data: address, not {source!r}")
    return replace(definition, **own)


def title_of(entry: ToolEntry | None) -> str:
    """Return the title of a tool, or that of its annotations; "" if it has none."""
    if entry is None:
        return ""
    tool = entry.tool
    hints = {} if tool.annotations is UNSET else tool.annotations
    return str(hints.get("title") or "") if tool.title is UNSET else tool.title


def annotations_of(tool_annotations: Any, options: Mapping[str, bool], where: str) -> Object | UnsetType:
    """Return the annotations of a tool, with what its own options (`destructive=True`) say.

    `tool_annotations` may also be an object with `model_dump`, such as `mcp.types.ToolAnnotations` of another package.
    """
    if tool_annotations is not UNSET and not isinstance(tool_annotations, Mapping):
        dump = getattr(tool_annotations, "model_dump", None)
        if dump is None or isinstance(tool_annotations, type):
            raise SchemaError(
                f"{where}: annotations: expected a dict, got {describe_value(tool_annotations)}; "
                "or write destructive=True"
            )
        tool_annotations = dump(by_alias=True, exclude_none=True)
    merged: Object = {} if tool_annotations is UNSET else dict(tool_annotations)
    for option, value in options.items():
        hint = HINTS[option]
        expect(f"{where}: {option}", value, "True or False", bool)
        if merged.get(hint, value) is not value:
            raise SchemaError(f"{where}: {option}={value} contradicts annotations.{hint}: {merged[hint]!r}; give one")
        merged[hint] = value
    return merged if merged or tool_annotations is not UNSET else UNSET


def _check_annotations(tool_annotations: Json, where: str) -> None:
    if type(tool_annotations) is not dict:
        raise SchemaError(f"{where}: annotations: expected a dict, got {describe_value(tool_annotations)}")
    for name, value in tool_annotations.items():
        if name in _HINTS:
            kind, type_name = (str, "text") if name == "title" else (bool, "boolean")
            if type(value) is not kind:
                raise SchemaError(f"{where}: annotations.{name}: {value!r} is not a {type_name}")
        elif not _VENDOR.match(name):  # a misspelled destructiveHint would let the tool run unasked
            near = _hint_for(name)
            option = next((f", or the option {option}=…" for option, hint in HINTS.items() if hint == near), "")
            meant = f"did you mean {near!r}{option}?" if near else f"known are {', '.join(_HINTS)}"
            raise SchemaError(
                f"{where}: annotations.{name}: unknown; {meant} (One of your own begins with 'x-' or has a '/'.)"
            )
    if tool_annotations.get("destructiveHint") is True and tool_annotations.get("readOnlyHint") is True:
        raise SchemaError(f"{where}: a tool cannot both be read-only and destroy something; leave one of them out")


def _hint_for(name: str) -> str | None:
    plain_names = {option.replace("_", ""): hint for option, hint in HINTS.items()}
    return plain_names.get(name.lower().replace("_", "").replace("-", "")) or closest(name, _HINTS)


L = TypeVar("L", bound=ToolEntry)


class Catalog(Generic[L]):
    """Entries of one kind, in the order they were added.

    May be changed from any thread while calls run; the watchers are called after each change, in that thread.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind  # in error texts
        self._entries: dict[str, L] = {}
        self._listed: dict[str, L] = {}
        self._switched_off: set[str] = set()  # names that an operator switched off, whether or not they exist now
        self._last_position = 0
        self._lock = threading.RLock()
        self._pages: dict[
            tuple[str, int, int, frozenset[str], frozenset[str], tuple[L, ...]], tuple[Raw, int | None]
        ] = {}
        self.hiding: frozenset[str] = frozenset()  # scopes that make an entry appear
        self.watchers: list[Callable[[], None]] = []
        self.get = self._listed.get

    def __iter__(self) -> Iterator[L]:
        """The entries that are listed."""
        return iter(list(self._listed.values()))

    @property
    def has_entries(self) -> bool:
        """Whether there were ever any: a capability that was declared to a client stays."""
        return self._last_position > 0

    @property
    def entries(self) -> list[L]:
        """All entries, also those that are switched off."""
        return list(self._entries.values())

    def conflict(self, entry: L) -> str:
        """Return why an entry cannot be added; empty if it can."""
        is_taken = entry.name in self._entries
        return f"{self.kind} {entry.name!r} exists already; remove it first, or choose another name" if is_taken else ""

    def entry(self, name: str) -> L | None:
        """Return the entry of a name, also one that is switched off."""
        return self._entries.get(name)

    def knows(self, name: str) -> bool:
        """Return whether there is an entry of this name, or an operator has switched the name off."""
        return name in self._entries or name in self._switched_off

    def add(self, entry: L) -> None:
        for problem in self.exchange((), (entry,)):
            raise SchemaError(problem)

    def exchange(self, removed: Collection[L], added: Iterable[L], *, in_place: bool = False) -> list[str]:
        """Remove the entries that are still here and add others, as one change; return why some were not added.

        `in_place`: each entry has its position already. Else it comes last.
        """
        problems = []
        with self._lock:
            is_changed = bool(removed)
            for entry in removed:
                if self._entries.get(entry.name) is entry:
                    del self._entries[entry.name]
            for entry in added:
                if problem := self.conflict(entry):
                    problems.append(problem)
                    continue
                if not in_place:
                    self._last_position += 1
                    entry.position = self._last_position
                entry.prepare()
                self._entries[entry.name] = entry
                is_changed = True
            if in_place:
                self._entries = dict(sorted(self._entries.items(), key=lambda each: each[1].position))
        if is_changed:
            self._rebuild()
        return problems

    def mirror(self, source: Catalog[L], prefix: str, server: Any) -> None:
        """Have what another server has, from now on; `server` is that server. What is switched off there is so here."""
        copied: dict[tuple[str, bool], L] = {}

        def copy() -> None:
            theirs = {(each.name, source.is_on(each)): each for each in source.entries if not each.trusted_output}
            gone = [copied.pop(key) for key, ours in list(copied.items()) if theirs.get(key) is not ours.origin]
            added = {
                key: replace(each.renamed(prefix), origin=each, via=(server, *each.via), enabled=key[1])
                for key, each in theirs.items()
                if key not in copied
            }
            copied.update(added)
            for problem in self.exchange(gone, added.values()):
                log.warning("server %r: not included: %s", server.name, problem)

        copy()
        source.watchers.append(copy)

    def remove(self, name: str) -> None:
        with self._lock:
            self._require(name)
            del self._entries[name]
        self._rebuild()

    def enable(self, name: str, enabled: bool) -> None:
        with self._lock:
            entry = self._require(name)
            if entry.enabled is enabled:
                return
            entry.enabled = enabled
        self._rebuild()

    def switch(self, name: str, on: bool) -> None:
        """Switch a name on or off for an operator. It stays off when its entry is removed, and when one is added."""
        with self._lock:
            (self._switched_off.discard if on else self._switched_off.add)(name)
            if on and name in self._entries:
                self._entries[name].enabled = True
        self._rebuild()

    def visible(
        self, scopes: frozenset[str], hidden: frozenset[str] = frozenset(), variants: tuple[L, ...] = ()
    ) -> list[L]:
        """Return the listed entries that a caller with these scopes may see, without those that rules hide.

        `variants` are entries that the caller has in place of those of the same names.
        """
        own = {each.name: each for each in variants}
        listed = [own.get(name, each) for name, each in self._listed.items() if name not in hidden]
        return [each for each in listed if not each.withheld and each.is_visible_to(scopes)]

    def closest(self, name: str, scopes: frozenset[str], hidden: frozenset[str] = frozenset()) -> str | None:
        """Return the visible name most like this one, for a hint."""
        return closest(name, (entry.name for entry in self.visible(scopes, hidden)))

    def page(
        self,
        revision: Revision,
        after: int,
        size: int,
        scopes: frozenset[str],
        hidden: frozenset[str] = frozenset(),
        clean: Callable[[Json], Json] | None = None,
        variants: tuple[L, ...] = (),
    ) -> tuple[Raw, int | None]:
        """Return the entries after place `after` as JSON, and the place that the next page begins after, if any."""
        key = (revision.name, after, size, scopes & self.hiding, hidden, variants)
        with self._lock:
            if key not in self._pages:
                if len(self._pages) >= MAX_PAGES:
                    self._pages = {}
                rest = [entry for entry in self.visible(scopes, hidden, variants) if entry.position > after]
                page = rest[:size] if size else rest
                listed = [entry.definition(revision) for entry in page]
                items = b",".join(encode(clean(to_builtins(each)) if clean else each) for each in listed)
                self._pages[key] = Raw(b"[" + items + b"]"), page[-1].position if len(page) < len(rest) else None
            return self._pages[key]

    def is_on(self, entry: L) -> bool:
        return entry.enabled and entry.name not in self._switched_off

    def _require(self, name: str) -> L:
        if name not in self._entries:
            near = closest(name, self._entries)
            raise KeyError(f"no {self.kind} {name!r}" + (f"; did you mean {near!r}?" if near else ""))
        return self._entries[name]

    def _rebuild(self) -> None:
        with self._lock:
            self._listed = {name: entry for name, entry in self._entries.items() if self.is_on(entry)}
            self.get = self._listed.get
            self._pages = {}
            hidden = [entry.scopes for entry in self._listed.values() if entry.hide]
            self.hiding = frozenset().union(*hidden)
        for watcher in list(self.watchers):
            try:
                watcher()
            except Exception:  # an observer must not come between a change and the others
                log.exception("catalog: a watcher of the list of %ss failed", self.kind)


ToolCatalog = Catalog[ToolEntry]
