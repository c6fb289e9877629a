"""One file for a server's guards and listener: `handrail.toml`.

Every section is a value of a class that Python code can make too; `Config.guards()` is what `Server.guard(**…)` takes.
An unknown key is an error that names the closest one: a misspelt rule must not be ignored.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from msgspec import Meta, Struct, ValidationError, convert, field
from msgspec.structs import fields, replace

from handrail.approvals.queue import Approvals
from handrail.audit.checkpoints import is_path
from handrail.audit.log import DATABASES, TrailSettings
from handrail.engine.guard_set import FILES_READ, GuardOptions
from handrail.errors import HandrailError
from handrail.gateway.settings import UpstreamSettings
from handrail.guards.identity import ApiKeys, Verifier
from handrail.guards.limits import Rates
from handrail.guards.policy import Policy, Rule
from handrail.guards.sanitize import Sanitize
from handrail.stores import is_url, public_url
from handrail.suggest import closest

__all__ = [
    "AccessSettings",
    "AuditSettings",
    "Config",
    "ConfigError",
    "ConsoleSettings",
    "HttpSettings",
    "IdentitySettings",
    "RepairSettings",
    "StoreSettings",
    "load_config",
]

FILE_NAME = "handrail.toml"
STATE_FILE = "state.db"  # in the state folder: audit and approvals
MAX_FILE_BYTES = 1024 * 1024
SECTIONS = {  # that a guard is made of, where that is not the section of its name
    "policy": {"groups", "access", "rules"},
    "rates": {"limits"},
    "trail": {"audit"},
    "audit_arguments": {"audit"},
    "store": {"store", "audit"},
    "accept_loss": {"store"},
}

_KINDS = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "array": "a list"}
_KINDS |= {"int | float": "a number", "object": "a section", "null": "nothing"}
_KIND = re.compile(r"`([a-z |]+)`")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_KEY = re.compile(r"[a-z_]+(\.[^:]+)?: ")


class ConfigError(HandrailError, ValueError):
    """The configuration cannot be used; says where and why."""


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class TargetSettings(_Section, frozen=True):
    """Which server the file is for."""

    target: Annotated[str, Meta(description="FILE[:OBJECT], from this file's folder, for commands that name none.")] = (
        ""
    )


class HttpSettings(_Section, frozen=True):
    """Where the server listens, if it is to listen over HTTP."""

    listen: Annotated[str, Meta(description="Address and port, such as 127.0.0.1:8000; empty: standard input.")] = ""
    hosts: Annotated[list[str], Meta(description="Names it answers to beside those of the local machine.")] = []
    origins: Annotated[list[str], Meta(description="Web pages that may talk to it beside its own.")] = []
    workers: Annotated[int, Meta(description="Processes on one port.", ge=1)] = 1
    metrics: Annotated[str, Meta(description="An address of its own for the numbers of Prometheus.")] = ""
    access_log: Annotated[bool, Meta(description="A line for each request.")] = False
    advertise: Annotated[
        str, Meta(description="Where other replicas reach this one, as http://10.1.2.3:8000; empty: where it listens.")
    ] = ""

    def __post_init__(self) -> None:
        for name in filter(self.__getattribute__, ("listen", "metrics")):
            _check_address(f"http.{name}", getattr(self, name))


def _check_address(where: str, text: str) -> None:
    from handrail.transports.http1.listen import Address  # and a good deal more, which stdio does without

    try:
        Address.parse(text)
    except ValueError as problem:
        raise ValueError(f"{where}: {problem}") from None


ConsoleRole = Literal["view", "call", "approve", "manage"]


class ConsoleSettings(_Section, frozen=True):
    """The page beside the server that shows its calls, and lets a person decide."""

    listen: Annotated[
        str, Meta(description="Address and port, such as 127.0.0.1:7420; empty: only where --console asks for it.")
    ] = ""
    hosts: Annotated[list[str], Meta(description="Names it answers to; none: those of the local machine.")] = []
    principal: Annotated[
        str, Meta(description="Whom the start link signs in: they call tools, and decide, as this.", min_length=1)
    ] = "local"
    roles: Annotated[
        list[ConsoleRole],
        Meta(description="What they may: look; try tools; decide; switch tools, cancel and accept changes."),
    ] = field(default_factory=lambda: ["view", "call", "approve", "manage"])

    def __post_init__(self) -> None:
        if self.listen:
            _check_address("console.listen", self.listen)


class IdentitySettings(_Section, frozen=True):
    """Who may come in over HTTP. Without any key, and without a token's issuer: everybody who reaches the address."""

    keys: Annotated[dict[str, str], Meta(description="Hashes of API keys by the name of their holder: sha256:…")] = {}
    scopes: Annotated[dict[str, list[str]], Meta(description="What each holder of a key may be told apart by.")] = {}
    issuer: Annotated[str, Meta(description="Who issues the JSON Web Tokens that are taken.")] = ""
    audience: Annotated[str, Meta(description="What those tokens must have been issued for.")] = ""
    jwks_url: Annotated[str, Meta(description="Where the issuer's public keys are.")] = ""

    def __post_init__(self) -> None:
        if self.keys and self.issuer:
            raise ValueError("identities: keys and issuer: choose one of them")
        if bool(self.issuer) != bool(self.audience and self.jwks_url):
            raise ValueError("identities: issuer, audience and jwks_url belong together")

    def verifier(self) -> Verifier | None:
        if self.keys or self.scopes:
            try:
                return ApiKeys(self.keys, scopes=self.scopes)
            except ValueError as problem:
                raise ValueError(f"identities.{problem}") from None
        if not self.issuer:
            return None
        from handrail.oauth.resource_server import JwtVerifier

        return JwtVerifier(issuer=self.issuer, audience=self.audience, jwks_url=self.jwks_url)


class AccessSettings(_Section, frozen=True):
    """What holds where no rule does."""

    default: Annotated[Literal["allow", "deny", "ask"], Meta(description="For a tool no rule speaks of.")] = "allow"
    destructive: Annotated[
        Literal["allow", "deny", "ask"], Meta(description="For one that its author calls destructive.")
    ] = "ask"


class RepairSettings(_Section, frozen=True):
    """Arguments of the wrong type that have exactly one lossless reading, such as "5" for a number."""

    on: Annotated[bool, Meta(description="Read them so, and say that it was done.")] = False


class StoreSettings(_Section, frozen=True):
    """What the replicas of a server share: sessions, limits, and approvals unless PostgreSQL has them."""

    url: Annotated[str, Meta(description="redis://…, rediss://…, redis+sentinel://… or redis+cluster://….")] = ""
    accept_loss: Annotated[
        bool, Meta(description="Keep approvals in a store that may lose a write, so that one may count twice.")
    ] = False

    def __post_init__(self) -> None:
        _check_url("store.url", self.url, "redis://127.0.0.1:6379")


def _check_url(where: str, url: str, example: str) -> None:
    if url and not is_url(url):
        raise ValueError(f"{where}: {public_url(url)!r} is not a URL such as {example}")


class AuditSettings(_Section, frozen=True):
    """The record of each call."""

    on: Annotated[bool, Meta(description="Write it.")] = True
    url: Annotated[str, Meta(description="postgresql://…, in place of a file; it has the approvals too.")] = ""
    file: Annotated[
        str, Meta(description="A .db or .jsonl file, from this file's folder; empty: state.db in the state folder.")
    ] = ""
    arguments: Annotated[bool, Meta(description="With the arguments, secrets masked; else only their digest.")] = False
    kept: TrailSettings = TrailSettings()

    def __post_init__(self) -> None:
        _check_url("audit.url", self.url, "postgresql://127.0.0.1/handrail")
        if self.file and self.url:
            raise ValueError("audit: file and url: choose one of them")
        if self.file and Path(self.file).suffix not in (".jsonl", *DATABASES):
            raise ValueError(f"audit.file: {self.file!r} does not end in .jsonl, or in {', '.join(DATABASES)}")


class Config(_Section, frozen=True):
    """The whole file."""

    server: TargetSettings = TargetSettings()
    http: HttpSettings = HttpSettings()
    console: ConsoleSettings = ConsoleSettings()
    identities: IdentitySettings = IdentitySettings()
    groups: Annotated[dict[str, list[str]], Meta(description="Principals by the name of their group.")] = {}
    access: AccessSettings = AccessSettings()
    rules: Annotated[list[Rule], Meta(description="In their order; a deny counts wherever it stands.")] = []
    limits: Rates = Rates()
    approvals: Approvals = Approvals()
    sanitize: Sanitize = Sanitize()
    repair: RepairSettings = RepairSettings()
    audit: AuditSettings = AuditSettings()
    store: StoreSettings = StoreSettings()
    upstreams: Annotated[dict[str, UpstreamSettings], Meta(description="The servers behind `handrail gateway`.")] = {}

    def policy(self) -> Policy:
        return Policy(self.rules, groups=self.groups, default=self.access.default, destructive=self.access.destructive)

    def disabled_guards(self) -> list[str]:
        """The guards that are on from the start and that this turns off, each as it is written."""
        settings = ['access.destructive = "allow"'] if self.access.destructive == "allow" else []
        settings += [
            f'limits.{name} = ""' for name in ("principal", "address", "lists") if not getattr(self.limits, name)
        ]
        tools = [(f"sanitize.tools.{tool}", tool_settings) for tool, tool_settings in self.sanitize.tools.items()]
        for place, part in [("sanitize", self.sanitize), *tools]:
            for name in ("controls", "secrets", "media"):
                if (value := getattr(part, name)) in ("keep", "report"):
                    settings.append(f'{place}.{name} = "{value}"')
        settings += ["store.accept_loss = true"] if self.store.accept_loss else []
        return settings + ([] if self.audit.on else ["audit.on = false"])

    def audit_place(self, state: Path) -> Path | str:
        """Return the file of the audit log, or its URL."""
        return self.audit.url or (Path(self.audit.file) if self.audit.file else state / STATE_FILE)

    def guards(self, state: Path | None) -> GuardOptions:
        """For `Server.guard`; what has to be kept is kept in the folder `state`. Without one there is no audit."""
        options: GuardOptions = {
            "policy": self.policy(),
            "rates": self.limits,
            "approvals": self.approvals,
            "sanitize": self.sanitize,
            "repair": self.repair.on,
        }
        if state is None:
            return options
        place = self.audit_place(state)
        if self.audit.on:
            options |= {"audit": place, "trail": self.audit.kept, "audit_arguments": self.audit.arguments}
        if self.store.url:
            options |= {"store": self.store.url, "accept_loss": self.store.accept_loss}
        elif not self.audit.on or (isinstance(place, Path) and place.suffix not in DATABASES):
            options["store"] = state / STATE_FILE
        return options

    def approval_place(self, state: Path) -> Path | str:
        """Return the file in which approvals wait, or the URL of the store or of the audit log that has them."""
        if self.audit.on and self.audit.url:
            return self.audit.url
        options = self.guards(state)
        return cast("Path | str", options.get("store", options.get("audit")))


def load_config(path: str | Path) -> Config:
    """Return what a `handrail.toml` says; ConfigError says where it is wrong. `Server(…, **config.guards(folder))`."""
    return read(document(path), str(path))


def document(path: str | Path) -> dict[str, Any]:
    """The sections of a file, as they are written."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise ConfigError(f"{path}: {problem.strerror}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: more than {MAX_FILE_BYTES:,} bytes")
    FILES_READ.add(str(path.resolve()))
    try:
        return tomllib.loads(text.decode("utf-8-sig"))
    except ValueError as problem:
        raise ConfigError(f"{path}: not TOML: {problem}") from None


def read(sections: dict[str, Any], where: str = FILE_NAME) -> Config:
    """A configuration from what TOML, or any other such file, says; what it names lies beside the file."""
    for problem in _unknown_keys(sections, Config, ""):
        raise ConfigError(f"{where}: {problem}")
    try:
        config = convert(sections, Config)
        config.policy()
        config.identities.verifier()
    except ValidationError:
        raise ConfigError(f"{where}: {_describe_error(sections, Config, '')}") from None
    except (ValueError, ModuleNotFoundError) as problem:  # ModuleNotFoundError: an extra is not installed
        raise ConfigError(f"{where}: {problem}") from None
    return replace(config, audit=_beside(config.audit, Path(where).parent))


def _beside(audit: AuditSettings, folder: Path) -> AuditSettings:
    """Return the settings with the paths that they name read from `folder`."""
    signing = audit.kept.checkpoints
    paths = {
        name: str(folder / path) for name in ("key", "previous_key", "file") if is_path(path := getattr(signing, name))
    }
    kept = replace(audit.kept, checkpoints=replace(signing, **paths)) if paths else audit.kept
    return replace(audit, file=str(folder / audit.file) if audit.file else "", kept=kept)


def _unknown_keys(content: Any, kind: Any, path: str) -> Iterator[str]:
    """Keys that mean nothing, each with the closest that would."""
    kind = _unwrap(kind)
    if isinstance(kind, type) and issubclass(kind, Struct) and isinstance(content, dict):
        names = [each.encode_name for each in fields(kind)]
        for key in (each for each in content if each not in names):
            near = closest(key, names)
            hint = f"did you mean {near!r}?" if near else f"known are {', '.join(names)}"
            if path and not near and key in {each.encode_name for each in fields(Config)}:
                hint = f"{key!r} is a section of its own, not part of {path!r}"
            yield f"{_join_path(path, key)}: unknown key; {hint}"
    for inner, value, where in _parts_of(content, kind, path):
        yield from _unknown_keys(value, inner, where)


def _describe_error(content: Any, kind: Any, path: str) -> str:
    """The value that is wrong, by its place, and what would be right."""
    for inner, value, where in _parts_of(content, _unwrap(kind), path):
        try:
            convert(value, inner)
        except ValidationError:
            return _describe_error(value, inner, where)
    words = next((each for each in (_unwrap(kind), *get_args(_unwrap(kind))) if get_origin(each) is Literal), None)
    if words is not None and isinstance(content, str):
        return f"{path}: {content!r} is not one of {', '.join(get_args(words))}"
    try:
        convert(content, kind)
    except ValidationError as problem:
        text = _MISSING.sub(r"`\1` is missing", str(problem).split(" - at `$")[0])
        text = _KIND.sub(lambda match: _KINDS.get(match[1].removesuffix(" | null"), match[0]), text)  # TOML has no null
        if text.startswith(path.split(".")[0]):
            return text  # it knows its place
        return f"{path}.{text}" if _KEY.match(text) else f"{path}: {text[:1].lower()}{text[1:]}"
    raise AssertionError(f"{path}: nothing is wrong")


def _parts_of(content: Any, kind: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """What a value consists of: what each part should be, what it is, and its place."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Struct) and isinstance(content, dict):
        for each in fields(kind):
            if each.encode_name in content:
                yield each.type, content[each.encode_name], _join_path(path, each.encode_name)
    elif origin is list and isinstance(content, list):
        for number, value in enumerate(content, 1):
            yield inner[0], value, f"{path}[{number}]"
    elif origin is dict and isinstance(content, dict):
        for key, value in content.items():
            yield inner[1], value, _join_path(path, key)


def _unwrap(kind: Any) -> Any:
    """A type without what is said of it, and a section without that it may be missing."""
    inner = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    members = [each for each in get_args(inner) if each is not NoneType] if get_origin(inner) is UnionType else []
    is_section = len(members) == 1 and isinstance(members[0], type) and issubclass(members[0], Struct)
    return members[0] if is_section else inner


def _join_path(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
