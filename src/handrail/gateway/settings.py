"""The settings of one upstream server: options of `Server.include`, and the keys of `[upstreams.NAME]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta, Struct

from handrail.guards.limits import UpstreamRate
from handrail.guards.policy import any_glob
from handrail.suggest import describe_value, expect, seconds, texts

__all__ = ["AuthSettings", "UpstreamOptions", "UpstreamSettings", "short_name"]

MAX_NAME_CHARS = 64  # of a tool: what the hosts with the tightest limit take
MAX_SECRET_CHARS = 16 * 1024  # of a file
_DIGEST_CHARS = 8
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")

NewTools = Literal["ask", "allow", "hide"]
Collision = Literal["refuse", "suffix"]
PassedChange = Literal["wording", "widened", "narrowed", "schema", "hint"]
Restart = Literal["never"] | tuple[float, float]
"""The least and the most seconds between two tries of a server that fails; or none, for a command that has ended."""


class UpstreamOptions(TypedDict, total=False):
    """Options of an upstream server; they count only where `other` is none of this process.

    name: what the operator calls it (the name of the configuration's entry, of the command or of the host)
    trusted: believe the hints of its tools, and their names where there are none (False: `handrail trust NAME` asks)
    revision: "auto", "legacy" or the name of a revision ("auto")
    transport: over HTTP "auto", "streamable" or "sse" ("auto")
    headers: HTTP headers that every request to it has, such as its own API key
    auth: its own authorization over HTTP, such as `OAuth(…)`; with grant="user" each caller signs in for itself
    env: environment variables of the command, beside a short list of our own
    cwd: the folder the command runs in
    agree: `agree(entry)` returns whether a server of a configuration file may be started
    timeout: seconds, or (idle, total) seconds, of each call (60, 600)
    allow: patterns of its own names of tools that are offered (all)
    deny: patterns of those that are not (none)
    rename: new names of tools by their own names
    describe: new descriptions of tools by their own names
    new: "ask", "allow" or "hide" tools that were not there at first sight ("ask")
    pass_changes: kinds of changes of a tool that need no look: wording, widened, narrowed, schema, hint (none)
    collide: "refuse" a name that is taken, or add a number as "suffix" ("refuse")
    lock: a `tools.lock` file that pins the definitions of its tools (in memory)
    list_seconds: how long a first list waits for it (10)
    idle_seconds: a connection that was not used for so long is closed (300)
    max_sessions: connections to it at once; one caller has at most a quarter of them, or 4 (64)
    limits: how often it may be called (UpstreamRate())
    restart: (least, most) seconds between two tries if it fails; "never": a command starts once ((1, 60))
    """

    name: str
    trusted: bool
    revision: str
    transport: Literal["auto", "streamable", "sse"]
    headers: Mapping[str, str]
    auth: Any
    env: Mapping[str, str]
    cwd: str | Path
    agree: Callable[[Any], bool]
    timeout: float | tuple[float, float]
    allow: list[str]
    deny: list[str]
    rename: Mapping[str, str]
    describe: Mapping[str, str]
    new: NewTools
    pass_changes: list[PassedChange]
    collide: Collision
    lock: str | Path | None
    list_seconds: float
    idle_seconds: float
    max_sessions: int
    limits: UpstreamRate
    restart: Restart


class AuthSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Its authorization over HTTP, at the authorization server that it names. ${NAME} is a variable in every text."""

    grant: Annotated[
        Literal["client_credentials", "user"],
        Meta(description="client_credentials: one token, the gateway's own; user: each caller signs in for itself."),
    ]
    client_id: Annotated[str, Meta(description="The gateway's name there.")] = ""
    client_secret: Annotated[str, Meta(description="Its secret there, as ${NAME}.")] = ""
    client_secret_file: Annotated[str, Meta(description="A file that has the secret, from this file's folder.")] = ""
    private_key_file: Annotated[
        str, Meta(description="A PEM file with the key that signs in place of a secret, from this file's folder.")
    ] = ""
    signing_algorithm: Annotated[str, Meta(description="Of that key: ES256, for example.")] = ""
    issuer: Annotated[str, Meta(description="The authorization server of client_id; nothing: the first one named.")] = (
        ""
    )
    scopes: Annotated[list[str] | None, Meta(description="All that may be asked for; nothing: what it requires.")] = (
        None
    )
    client_metadata_url: Annotated[str, Meta(description="A document that says who the gateway is, with user.")] = ""
    redirect: Annotated[
        str, Meta(description="With user: where browsers come back to, if not at the gateway's own address.")
    ] = ""
    audience: Annotated[
        str,
        Meta(description="What the token is for, if the authorization server knows it by another name than its URL."),
    ] = ""

    def __repr__(self) -> str:
        return f"AuthSettings({self.grant!r}, …)"  # it may hold a secret

    @property
    def texts(self) -> dict[str, str]:
        """What may have variables in it, by key; keys without a value are left out."""
        return {name: text for name in _AUTH_TEXTS if (text := getattr(self, name))}

    def oauth(self, texts: Mapping[str, str], folder: Path) -> Any:
        """Return the authorization for `auth=`; `texts` are those of these settings, with their variables filled in."""
        from handrail.oauth.client import OAuth  # few upstreams need it

        options: dict[str, Any] = {name: text for name, text in texts.items() if not name.endswith("_file")}
        for name in ("client_secret", "private_key"):
            if path := texts.get(f"{name}_file"):
                if name in options:
                    raise ValueError(f"auth: {name} and {name}_file: choose one of them")
                options[name] = _read_secret(folder / path, f"auth: {name}_file")
        return OAuth(grant=self.grant, scopes=self.scopes, **options)


_AUTH_TEXTS = (
    "client_id",
    "client_secret",
    "client_secret_file",
    "private_key_file",
    "signing_algorithm",
    "issuer",
    "client_metadata_url",
    "redirect",
    "audience",
)


def _read_secret(path: Path, where: str) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_SECRET_CHARS + 1).strip()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not a text in UTF-8"
        raise ValueError(f"{where}: {path}: {reason}") from None
    if not 0 < len(text) <= MAX_SECRET_CHARS:
        raise ValueError(f"{where}: {path}: {'too long for a secret' if text else 'it is empty'}")
    return text


class UpstreamSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One upstream server behind the gateway."""

    command: Annotated[list[str] | str, Meta(description="The program and its arguments; never given to a shell.")] = ""
    url: Annotated[str, Meta(description="Its address, if it is reached over HTTP.")] = ""
    headers: Annotated[dict[str, str], Meta(description="Headers of each request; ${NAME} is a variable.")] = {}
    auth: Annotated[AuthSettings | None, Meta(description="Its authorization over HTTP.")] = None
    env: Annotated[dict[str, str], Meta(description="Environment of the command; ${NAME} is a variable.")] = {}
    cwd: Annotated[str, Meta(description="The folder the command runs in, from this file's folder.")] = ""
    prefix: Annotated[str | None, Meta(description="Goes before its names; nothing: its name and `_`.")] = None
    revision: Annotated[str, Meta(description="auto, legacy, or the revision it has to speak.")] = "auto"
    transport: Annotated[Literal["auto", "streamable", "sse"], Meta(description="Over HTTP; sse is that of 2024.")] = (
        "auto"
    )
    trusted: Annotated[bool, Meta(description="Believe the hints of its tools without a look.")] = False
    timeout: Annotated[float, Meta(description="Seconds that a call may be silent.", gt=0)] = 60.0
    allow: Annotated[
        list[str], Meta(description="Its own names of tools that are offered, `*` for any; none: all.")
    ] = []
    deny: Annotated[list[str], Meta(description="Its own names of tools that are not offered.")] = []
    rename: Annotated[dict[str, str], Meta(description="New names of tools, by their own names.")] = {}
    describe: Annotated[dict[str, str], Meta(description="New descriptions of tools, by their own names.")] = {}
    new: Annotated[NewTools, Meta(description="What happens to tools that were not there at first sight.")] = "ask"
    pass_changes: Annotated[list[PassedChange], Meta(description="Kinds of changes of a tool that need no look.")] = []
    collide: Annotated[Collision, Meta(description="A name that is taken: refuse it, or add a suffix.")] = "refuse"
    list_seconds: Annotated[float, Meta(description="How long a first list waits for it.", ge=0)] = 10.0
    idle_seconds: Annotated[float, Meta(description="An unused connection is closed after so long.", gt=0)] = 300.0
    max_sessions: Annotated[int, Meta(description="Connections to it at once.", ge=1)] = 64
    limits: UpstreamRate = UpstreamRate()
    restart: Annotated[
        Restart, Meta(description="Least and most seconds between two tries if it fails; never: a command starts once.")
    ] = (1.0, 60.0)

    def __post_init__(self) -> None:
        _pauses("restart", self.restart)

    def options(self) -> UpstreamOptions:
        """Return these settings as options of `Server.include`."""
        return {
            "trusted": self.trusted,
            "revision": self.revision,
            "transport": self.transport,
            "timeout": (self.timeout, max(self.timeout, 600.0)),
            "allow": self.allow,
            "deny": self.deny,
            "rename": self.rename,
            "describe": self.describe,
            "new": self.new,
            "pass_changes": self.pass_changes,
            "collide": self.collide,
            "list_seconds": self.list_seconds,
            "idle_seconds": self.idle_seconds,
            "max_sessions": self.max_sessions,
            "limits": self.limits,
            "restart": self.restart,
        }


class Terms(Struct, frozen=True, kw_only=True):
    """The options of one upstream, checked: what the gateway works with."""

    name: str
    prefix: str
    trusted: bool = False
    idle: float = 60.0
    total: float = 600.0
    revision: str = "auto"
    is_offered: Callable[[str], bool] = lambda name: True  # by a tool's own name
    rename: Mapping[str, str] = {}
    describe: Mapping[str, str] = {}
    new: NewTools = "ask"
    pass_changes: frozenset[str] = frozenset()
    collide: Collision = "refuse"
    list_seconds: float = 10.0
    idle_seconds: float = 300.0
    max_sessions: int = 64
    limits: UpstreamRate = UpstreamRate()
    restarts: bool = True  # a command that has ended
    pauses: tuple[float, float] = (1.0, 60.0)  # seconds between two tries of what fails: the least, the most
    is_of_users: bool = False  # each caller has a grant of its own

    @classmethod
    def of(cls, name: str, prefix: str, options: UpstreamOptions) -> Terms:
        where = f"include {name!r}"
        timeout = options.get("timeout", (60.0, 600.0))
        idle, total = timeout if isinstance(timeout, tuple | list) else (timeout, max(timeout, 600.0))
        allowed = any_glob(options.get("allow") or ["*"], f"{where}: allow")
        denied = any_glob(options.get("deny", []), f"{where}: deny")
        limits = options.get("limits", UpstreamRate())
        expect(f"{where}: limits", limits, 'UpstreamRate(rate="60/minute") of handrail.guards', UpstreamRate)
        restart = options.get("restart", (1.0, 60.0))
        return cls(
            name=name,
            prefix=prefix,
            trusted=options.get("trusted", False),
            idle=seconds(f"{where}: timeout", idle),
            total=seconds(f"{where}: timeout", total),
            revision=options.get("revision", "auto"),
            is_offered=lambda own_name: allowed(own_name) and not denied(own_name),
            rename=options.get("rename", {}),
            describe=options.get("describe", {}),
            new=options.get("new", "ask"),
            pass_changes=frozenset(texts(f"{where}: pass_changes", options.get("pass_changes", ()))),
            collide=options.get("collide", "refuse"),
            list_seconds=options.get("list_seconds", 10.0),
            idle_seconds=options.get("idle_seconds", 300.0),
            max_sessions=options.get("max_sessions", 64),
            limits=limits,
            restarts=restart != "never",
            pauses=_pauses(f"{where}: restart", restart),
            is_of_users=getattr(options.get("auth"), "is_of_users", False),
        )


def _pauses(where: str, restart: Any) -> tuple[float, float]:
    if restart == "never":
        return 1.0, 60.0
    if not isinstance(restart, tuple | list) or len(restart) != 2:
        raise TypeError(f'{where}: expected "never", or the least and the most seconds, got {describe_value(restart)}')
    least, most = (seconds(where, each) for each in restart)
    if least > most:
        raise ValueError(f"{where}: the least, {least:g} s, is more than the most, {most:g} s")
    return least, most


def short_name(name: str) -> str:
    """Return a name of at most 64 letters, digits, `_`, `-` and `.`; any other name ends in a digest of the whole."""
    if _NAME.fullmatch(name):
        return name
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST_CHARS]
    return f"{_NOT_IN_NAMES.sub('_', name)[: MAX_NAME_CHARS - _DIGEST_CHARS - 1]}_{digest}"
