"""Who gets into the console: every route tried by those who may not; codes, cookies and sessions."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from cli_runs import handrail
from handrail import Server
from handrail.audit.format import TrailError
from handrail.config import ConsoleSettings as Settings
from handrail.console import Console, static_files as pages
from handrail.console.access import ROLES, ApiError, SessionStore, new_code, token_from_cookies
from handrail.console.routes import ROUTES, Route, find_route
from handrail.engine.core import Limits
from patience import PATIENCE
from requirements import requirement
from rigs_console import Refused, Rig, consoled

STATIC = Path(pages.__file__).parent / "static"
JSON = {"content-type": "application/json"}
GUARDED = [route for route in ROUTES if route.access != "public"]
ROLED = [route for route in GUARDED if route.access in ROLES]


def named(route: Route) -> str:
    return f"{route.method} {route.path}"


def path_of(route: Route) -> str:
    """One that fits, and names nothing that is there."""
    return re.sub(r"\{\w+\}", "0", route.path)


@pytest.fixture
def now() -> list[float]:
    return [1_000_000.0]


@pytest.fixture
async def rig(now: list[float]) -> AsyncIterator[Rig]:
    server = Server("shop")

    @server.tool
    async def sell() -> str:
        return "sold"

    server.engine.clock = lambda: now[0]
    async with consoled(server) as made:
        yield made


class Visitor:
    """Somebody with headers of their own, who follows no rule."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.url = rig.console.url
        self.port = self.url.rpartition(":")[2]
        self.headers: dict[str, str] = {}
        self.csrf = ""

    async def sign_in(self, *roles: str) -> Visitor:
        code = new_code()
        await self.rig.console.context.sessions.add_code(code, "ada", roles)
        status, headers, body = await self.ask("POST", "/api/sign-in", {"code": code}, JSON)
        assert status == 200, body
        self.headers = {"cookie": headers["set-cookie"].split(";")[0]}
        self.csrf = json.loads(body)["csrf"]
        return self

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, bytes]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with aiohttp.ClientSession(skip_auto_headers=["content-type"]) as session:
            merged = {**self.headers, **(headers or {})}
            async with session.request(
                method, URL(self.url + path, encoded=True), data=data, headers=merged
            ) as response:
                if response.content_type == "text/event-stream":
                    return response.status, response.headers, b""
                return response.status, response.headers, await response.read()

    @property
    def held(self) -> dict[str, str]:
        """What the page keeps, and sends with every request."""
        return {"x-handrail-csrf": self.csrf}

    async def build(self) -> str:
        """Under which the page has its files."""
        found = re.search(r'"\./assets/([0-9a-f]{16})/console\.js"', (await self.ask("GET", "/"))[2].decode())
        assert found
        return found[1]

    async def use(self, route: Route, **headers: str) -> int:
        """As the page would, and with these headers."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if route.method == "GET":
            return (await self.ask("GET", path_of(route), headers={**self.held, **sent}))[0]
        known = {**JSON, **self.held, "origin": self.url}
        return (await self.ask("POST", path_of(route), {}, {**known, **sent}))[0]


# Every route


def test_every_route_says_who_may_use_it() -> None:
    assert {route.access for route in ROUTES} <= {"public", "session", *ROLES}
    assert {named(route) for route in ROUTES if route.access == "public"} == {
        "GET /",
        "GET /assets/{build}/{name}",
        "POST /api/sign-in",
    }
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
    changing = {route.path for route in ROUTES if route.method == "POST" and route.access == "view"}
    assert not changing, "looking is not enough to change something"
    with pytest.raises(TypeError):
        Route("GET", "/api/open")  # type: ignore[call-arg]  # that is the point


@requirement("APP-17", "P-23")
@pytest.mark.parametrize("route", GUARDED, ids=named)
async def test_nobody_without_a_session_gets_in(route: Route, rig: Rig) -> None:
    visitor = Visitor(rig)
    assert await visitor.use(route) == 401
    assert await visitor.use(route, cookie=f"handrail-console-{visitor.port}=guessed") == 401


@requirement("APP-17", "P-23")
@pytest.mark.parametrize("route", GUARDED, ids=named)
async def test_every_request_needs_the_token_that_the_page_holds(route: Route, rig: Rig) -> None:
    visitor, other = await Visitor(rig).sign_in(*ROLES), await Visitor(rig).sign_in(*ROLES)
    assert await visitor.use(route, x_handrail_csrf="") == 401
    assert await visitor.use(route, x_handrail_csrf=other.csrf) == 401
    assert await Visitor(rig).use(route, x_handrail_csrf=visitor.csrf) == 401  # nor is it worth anything alone


async def test_the_token_of_the_page_is_told_once(rig: Rig) -> None:
    visitor = await Visitor(rig).sign_in(*ROLES)
    status, _, said = await visitor.ask("GET", "/api/me", headers={"x-handrail-csrf": visitor.csrf})
    assert status == 200 and visitor.csrf.encode() not in said


@requirement("P-23")
@pytest.mark.parametrize("route", ROLED, ids=named)
async def test_a_route_needs_its_role(route: Route, rig: Rig) -> None:
    without = await Visitor(rig).sign_in(*(role for role in ROLES if role != route.access))
    assert await without.use(route) == 403
    having = await Visitor(rig).sign_in(route.access)
    assert await having.use(route) in (200, 400, 404, 409, 422)


@requirement("APP-17", "P-22")
@pytest.mark.parametrize("route", ROUTES, ids=named)
async def test_no_other_site_gets_in(route: Route, rig: Rig) -> None:
    visitor = await Visitor(rig).sign_in(*ROLES)
    for origin in ("https://evil.example", "null", f"http://localhost:{int(visitor.port) + 1}", f"{visitor.url}.evil"):
        assert await visitor.use(route, origin=origin) == 403, origin
    for host in ("evil.example", f"evil.example:{visitor.port}", ""):
        assert await visitor.use(route, host=host) in (400, 403), host
    if route.path != "/":
        assert await visitor.use(route, sec_fetch_site="cross-site") == 403


@requirement("APP-17", "P-22")
@pytest.mark.parametrize("route", [route for route in ROUTES if route.method == "POST"], ids=named)
async def test_a_form_of_another_page_is_no_request(route: Route, rig: Rig) -> None:
    visitor = await Visitor(rig).sign_in(*ROLES)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert await visitor.use(route, content_type=kind) == 415, kind


async def test_what_was_refused_has_changed_nothing(rig: Rig) -> None:
    looking = await Visitor(rig).sign_in("view", "call", "approve")
    switch = {**JSON, "x-handrail-csrf": looking.csrf}
    assert (await looking.ask("POST", "/api/tools/sell/switch", {"on": False}, switch))[0] == 403
    managing = await Visitor(rig).sign_in("manage")
    assert (await managing.ask("POST", "/api/tools/sell/switch", {"on": False}, JSON))[0] == 401
    forged = {**JSON, "x-handrail-csrf": managing.csrf, "origin": "https://evil.example"}
    assert (await managing.ask("POST", "/api/tools/sell/switch", {"on": False}, forged))[0] == 403
    assert [tool.name for tool in rig.console.server.tools] == ["sell"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/nothing", 404),
        ("GET", "/api/sign-in", 405),
        ("DELETE", "/api/me", 405),
        ("HEAD", "/api/me", 405),
        ("GET", "/assets/BUILD/..%2findex.html", 404),
        ("GET", "/assets/BUILD/%2e%2e", 404),
        ("GET", "/assets/BUILD/__init__.py", 404),
        ("GET", "/assets/BUILD/nothing.js", 404),
        ("GET", "/assets/../console.js", 404),
        ("GET", "/assets/console.js", 404),
        ("GET", "//evil.example/", 404),
    ],
)
async def test_what_is_not_a_route_is_not_there(method: str, path: str, status: int, rig: Rig) -> None:
    visitor = Visitor(rig)
    assert (await visitor.ask(method, path.replace("BUILD", await visitor.build())))[0] == status


async def test_names_in_a_path_may_hold_anything() -> None:
    assert find_route("POST", "/api/tools/a%2Fb%20c/switch")[1] == {"name": "a/b c"}
    with pytest.raises(ApiError):
        find_route("POST", "/api/tools/a/b/switch")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"text"', b'{"code": 5}', b"{}"])
async def test_a_body_that_is_none_is_said_so(body: bytes, rig: Rig) -> None:
    status, _, said = await Visitor(rig).ask("POST", "/api/sign-in", body, JSON)
    assert status == 400 and json.loads(said)["error"]


async def test_a_body_has_an_end() -> None:
    async with consoled(Server("shop", limits=Limits(max_message_bytes=1000))) as rig:
        assert (await Visitor(rig).ask("POST", "/api/sign-in", b" " * 1001, JSON))[0] == 413


@requirement("APP-17", "P-23")
@pytest.mark.parametrize("path", ["/", "/assets/BUILD/console.js", "/assets/0/console.js", "/api/me", "/api/nothing"])
async def test_every_answer_is_locked_into_its_own_page(path: str, rig: Rig) -> None:
    visitor = Visitor(rig)
    _, headers, _ = await visitor.ask("GET", path.replace("BUILD", await visitor.build()))
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert not [name for name in headers if name.lower().startswith("access-control")]
    if path.startswith("/api"):
        assert headers["cache-control"] == "no-store"


async def test_the_page_is_there_for_everybody_and_packed_for_who_can_unpack_it(rig: Rig) -> None:
    visitor = Visitor(rig)
    status, headers, body = await visitor.ask("GET", "/")
    assert status == 200 and headers["content-type"].startswith("text/html") and b"<script" in body
    script = f"/assets/{await visitor.build()}/console.js"
    plain = await visitor.ask("GET", script, headers={"accept-encoding": "identity"})
    packed = await visitor.ask("GET", script, headers={"accept-encoding": "gzip"})
    assert plain[2] == packed[2] and int(packed[1]["content-length"]) < int(plain[1]["content-length"]) / 2


async def test_every_file_of_the_page_is_given_out_as_what_it_is(rig: Rig) -> None:
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
    visitor = Visitor(rig)
    build = await visitor.build()
    built = sorted((STATIC / "assets").iterdir())
    assert len(built) > 10
    for path in built:
        status, headers, body = await visitor.ask("GET", f"/assets/{build}/{path.name}")
        assert (status, body) == (200, path.read_bytes())
        assert headers["content-type"].split(";")[0] == kinds[path.suffix]


async def test_a_page_gets_files_of_its_own_build_or_none(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names in a build's files are of that build alone: a part of another one would do something else."""
    static = tmp_path / "static"
    shutil.copytree(STATIC, static)
    monkeypatch.setattr(pages, "_STATIC", static)
    visitor = Visitor(rig)
    before = await visitor.build()
    _, headers, _ = await visitor.ask("GET", f"/assets/{before}/try.js")
    assert headers["cache-control"] == "max-age=31536000, immutable"  # what is at this address never changes
    assert (await visitor.ask("GET", "/"))[1]["cache-control"] == "no-cache"
    with (static / "assets" / "now.js").open("a") as script:  # an update, while the server runs
        script.write("// new")
    status, headers, body = await visitor.ask("GET", f"/assets/{before}/try.js")
    assert status == 404 and headers["cache-control"] == "no-store" and "reload it" in json.loads(body)["error"]
    after = await visitor.build()
    assert after != before and (await visitor.ask("GET", f"/assets/{after}/try.js"))[0] == 200


# Codes


@requirement("P-23")
async def test_a_start_link_is_good_once(rig: Rig) -> None:
    visitor, body = Visitor(rig), {"code": rig.console.start_code}
    status, headers, said = await visitor.ask("POST", "/api/sign-in", body, JSON)
    assert status == 200
    assert re.fullmatch(
        rf"handrail-console-{visitor.port}=[\w-]{{43}}; HttpOnly; SameSite=Strict; Path=/", headers["set-cookie"]
    )
    me = json.loads(said)
    assert (me["who"], me["roles"], me["server"]["name"]) == ("local", sorted(ROLES), "shop")
    again = await visitor.ask("POST", "/api/sign-in", body, JSON)
    assert again[0] == 403 and "set-cookie" not in again[1] and b"used before" in again[2]


@requirement("P-23")
async def test_of_two_who_use_a_link_at_once_one_gets_in(rig: Rig) -> None:
    body = {"code": rig.console.start_code}
    both = await asyncio.gather(*(Visitor(rig).ask("POST", "/api/sign-in", body, JSON) for _ in range(5)))
    assert sorted(status for status, _, _ in both) == [200, 403, 403, 403, 403]


@requirement("P-23")
async def test_a_start_link_is_good_for_five_minutes(rig: Rig, now: list[float]) -> None:
    now[0] += 301
    status, _, said = await Visitor(rig).ask("POST", "/api/sign-in", {"code": rig.console.start_code}, JSON)
    assert status == 403 and b"5 minutes" in said


async def test_a_used_link_stays_used_when_a_worker_begins_again(rig: Rig) -> None:
    console = rig.console
    await console.context.sessions.redeem(console.start_code)
    await console.context.sessions.add_code(console.start_code, "local", ROLES)
    with pytest.raises(ApiError, match="used before"):
        await console.context.sessions.redeem(console.start_code)


async def test_a_link_is_for_one_server(rig: Rig) -> None:
    async with consoled(Server("other", store=rig.console.context.store)) as other:
        with pytest.raises(ApiError, match="another server"):
            await other.console.context.sessions.redeem(rig.console.start_code)


async def test_what_is_kept_of_a_code_and_a_session_is_a_hash(rig: Rig) -> None:
    token, _ = await rig.console.context.sessions.redeem(rig.console.start_code)
    kept = repr(await rig.console.context.store.scan("console-"))
    assert "console-session:" in kept and token not in kept and rig.console.start_code not in kept


async def test_the_configuration_says_whom_the_link_signs_in() -> None:
    settings = Settings(principal="grace", roles=["view", "approve"])
    async with consoled(Server("shop"), settings=settings) as rig:
        _, session = await rig.console.context.sessions.redeem(rig.console.start_code)
        assert (session.who, session.roles) == ("grace", frozenset({"view", "approve"}))


# Sessions


@requirement("P-23")
async def test_a_session_ends_after_twelve_hours_without_use(rig: Rig, now: list[float]) -> None:
    page = await rig.page()
    for _ in range(3):
        now[0] += 11 * 3600
        assert (await page.get("me"))["who"] == "local"
    now[0] += 12 * 3600 + 1
    with pytest.raises(Refused) as refused:
        await page.get("me")
    assert refused.value.status == 401


@requirement("P-23")
async def test_a_session_ends_after_a_week_however_often_it_is_used(rig: Rig, now: list[float]) -> None:
    page = await rig.page()
    for _ in range(7 * 4 - 1):
        now[0] += 6 * 3600
        await page.get("me")
    now[0] += 6 * 3600
    with pytest.raises(Refused) as refused:
        await page.get("me")
    assert refused.value.status == 401


@requirement("P-23")
async def test_whoever_was_signed_in_by_the_settings_has_the_roles_they_have_now(rig: Rig) -> None:
    access, store = rig.console.context.sessions, rig.console.context.store
    token, session = await access.redeem(rig.console.start_code)
    assert session.roles == frozenset(ROLES)
    await access.add_code("by hand", "bob", ["view", "approve"])
    other, _ = await access.redeem("by hand")
    later = SessionStore(store, rig.console.server.name, rig.console.context.clock, ["view"])  # it was started again
    assert [found and found.roles for found in (await later.find_session(token), await later.find_session(other))] == [
        frozenset({"view"}),
        frozenset({"view", "approve"}),
    ]


async def test_whoever_signs_out_is_out_and_so_are_their_streams(rig: Rig) -> None:
    visitor = await Visitor(rig).sign_in(*ROLES)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{visitor.url}/api/events", headers=visitor.headers | visitor.held) as stream,
    ):
        assert await stream.content.readline() == b"event: hello\n"
        done = await visitor.ask("POST", "/api/sign-out", {}, JSON | visitor.held)
        assert done[0] == 200 and "Max-Age=0" in done[1]["set-cookie"]
        async with asyncio.timeout(PATIENCE):
            await stream.content.read()  # to its end
    assert (await visitor.ask("GET", "/api/me", headers=visitor.held))[0] == 401


async def test_a_session_of_one_server_is_none_of_another(rig: Rig) -> None:
    token, _ = await rig.console.context.sessions.redeem(rig.console.start_code)
    async with consoled(Server("other", store=rig.console.context.store)) as other:
        assert await other.console.context.sessions.find_session(token) is None
        assert await rig.console.context.sessions.find_session(token) is not None


async def test_what_somebody_does_at_the_console_is_on_record(tmp_path: Path) -> None:
    server = Server("shop", audit=tmp_path / "audit.jsonl")
    async with consoled(server) as rig:
        page = await rig.page("grace")
        await page.post("sign-out")
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text("utf-8").splitlines()]
    steps = [(each["step"], each["by"]) for each in lines if each["event"] == "console"]
    assert steps == [("signed in", "grace"), ("signed out", "grace")]


async def test_a_link_stays_good_while_signing_in_cannot_be_recorded(tmp_path: Path) -> None:
    async with consoled(Server("shop", audit=tmp_path / "audit.db")) as rig:
        trail, rig.console.context.guards.trail = rig.console.context.guards.trail, Full()  # type: ignore[assignment]
        visitor = Visitor(rig)
        status, _, said = await visitor.ask("POST", "/api/sign-in", {"code": rig.console.start_code}, JSON)
        assert status == 503 and "same link" in json.loads(said)["error"]
        rig.console.context.guards.trail = trail
        assert (await visitor.ask("POST", "/api/sign-in", {"code": rig.console.start_code}, JSON))[0] == 200
        assert (await visitor.ask("POST", "/api/sign-in", {"code": rig.console.start_code}, JSON))[0] == 403


async def test_whoever_signs_out_is_out_though_it_cannot_be_recorded(tmp_path: Path) -> None:
    async with consoled(Server("shop", audit=tmp_path / "audit.db")) as rig:
        page = await rig.page()
        rig.console.context.guards.trail = Full()  # type: ignore[assignment]
        await page.post("sign-out")
        with pytest.raises(Refused, match="Not signed in"):
            await page.get("me")


class Full:
    """The disk of an audit."""

    async def write(self, record: Any, changes: Any = ()) -> bool:
        raise TrailError("no space left")

    async def close(self) -> None: ...


# The command line


def test_handrail_console_needs_one_that_runs(tmp_path: Path) -> None:
    done = handrail("console", home=tmp_path)
    assert done.returncode == 2 and "handrail serve FILE --console" in done.stderr
    done = handrail("console", "--roles", "view,root", home=tmp_path)
    assert done.returncode == 2 and "'root' is not one of view, call, approve, manage" in done.stderr


@pytest.mark.parametrize(
    "others", ['theme={"a":1}', "a[b]=1", "flag", "na me=1", "x=\xe9", 'x="open', "", "=", "a=b=c"]
)
def test_cookies_of_other_servers_of_this_machine_do_not_sign_anybody_out(others: str) -> None:
    for line in (f"{others}; handrail-console-1=token; b=2", f"handrail-console-1=token;{others}"):
        assert token_from_cookies({b"cookie": line.encode("latin-1")}, "handrail-console-1") == "token"
    assert token_from_cookies({b"cookie": others.encode("latin-1")}, "handrail-console-1") == ""


async def test_a_socket_in_the_file_system_has_no_port_and_does(tmp_path: Path) -> None:
    console, path = Console(Server("quiet")), str(tmp_path / "console.sock")
    with console.listening(f"unix:{path}"):
        async with console.server.serving(), console.serving():
            connector = aiohttp.UnixConnector(path)
            sign_in: dict[str, Any] = {"url": "http://localhost/api/sign-in", "json": {"code": console.start_code}}
            async with aiohttp.ClientSession(connector=connector) as session, session.post(**sign_in) as answer:
                assert answer.status == 200 and "handrail-console-0=" in answer.headers["set-cookie"]
