"""OAuth as a client uses it, against a real authorization server: log in, renew, step up, move, and give up."""

from __future__ import annotations

import asyncio
import os
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from contextvars import Context
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest
from joserfc.jwk import ECKey

from authorization_server import Home
from handrail.errors import AuthorizationError
from handrail.oauth import client as callback
from handrail.oauth.client import OAuth, RedirectListener, open_browser
from patience import PATIENCE
from requirements import requirement

NOW = 1_800_000_000.0
DEADLINE = PATIENCE


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def home(clock: Clock) -> AsyncIterator[Home]:
    async with Home(clock).running() as running:
        yield running


class Caller:
    """The least a transport does: ask, and ask once more if that may help."""

    def __init__(self, home: Home, auth: OAuth) -> None:
        self.home, self.auth = home, auth

    async def call(self, tries: int = 2) -> str:
        """The token that was accepted, or the status of the last refusal."""
        async with aiohttp.ClientSession() as session, asyncio.timeout(DEADLINE):
            for left in reversed(range(tries)):
                headers = await self.auth.headers(self.home.url)
                async with session.post(self.home.url, headers=headers) as response:
                    if response.status == 200:
                        return str((await response.json())["token"])
                    told = response.headers.get("WWW-Authenticate", "")
                    if not await self.auth.challenged(self.home.url, response.status, told) or not left:
                        return str(response.status)
        raise AssertionError("never reached")


@pytest.fixture
async def caller(home: Home, clock: Clock) -> AsyncIterator[Callable[..., Caller]]:
    async with AsyncExitStack() as stack:

        def make(**options: Any) -> Caller:
            usual: dict[str, Any] = {"browser": home.agree, "clock": clock}
            auth = OAuth(**usual | options)
            stack.push_async_callback(auth.close)
            return Caller(home, auth)

        yield make


@requirement("CLI-42", "P-26")
async def test_a_client_that_nobody_knows_logs_in(home: Home, caller: Callable[..., Caller]) -> None:
    me = caller()
    assert await me.call() == "Bearer access-2"
    assert await me.call() == "Bearer access-2"
    assert [path for path, _ in home.asked] == [
        "/mcp",
        "/.well-known/oauth-protected-resource/mcp",
        "/.well-known/oauth-authorization-server",
        "/register",
        "/authorize",
        "/token",
        "/mcp",
        "/mcp",
    ]
    assert all(parse_qs(urlsplit(path).query) == {} for path, _ in home.asked)
    assert home.count("/register", application_type="native") == 1


@requirement("P-26")
async def test_no_credentials_go_with_what_is_public(home: Home, caller: Callable[..., Caller]) -> None:
    me = caller()
    await me.call()
    home.refuses = True
    assert await me.call() == "401"
    for path, fields in home.asked:
        if path not in ("/mcp", "/token"):
            assert "Authorization" not in fields and "Cookie" not in fields


async def test_the_url_somebody_was_sent_to_may_be_pasted(home: Home, caller: Callable[..., Caller]) -> None:
    asked: list[str] = []

    async def paste(url: str, host: str) -> str:
        asked.append(host)
        return f"  {await home.paste(url, host)}\n"

    assert await caller(browser=paste).call() == "Bearer access-2"
    assert asked == [urlsplit(home.issuer).netloc]


async def test_a_plain_function_may_be_the_browser(home: Home, caller: Callable[..., Caller]) -> None:
    loop = asyncio.get_running_loop()

    def blocking(url: str, host: str) -> bool:
        return asyncio.run_coroutine_threadsafe(home.agree(url, host), loop).result(DEADLINE)

    assert await caller(browser=blocking).call() == "Bearer access-2"
    assert await caller(browser=lambda url, host: home.agree(url, host)).call() == "Bearer access-4"


@pytest.mark.parametrize("method", ["client_secret_basic", "client_secret_post", "none"])
@requirement("CLI-42", "P-26")
async def test_a_client_the_user_registered(home: Home, caller: Callable[..., Caller], method: str) -> None:
    redirect = "https://app.example/callback"
    home.knows("mine", "a:b/c d", method, redirects=(redirect,))
    home.more_metadata["token_endpoint_auth_methods_supported"] = [method]
    secret = {} if method == "none" else {"client_secret": "a:b/c d"}
    me = caller(client_id="mine", redirect=redirect, browser=home.paste, **secret)
    assert await me.call() == "Bearer access-1"
    assert home.count("/register") == 0


@requirement("CLI-42")
async def test_a_client_for_itself_with_a_secret(home: Home, caller: Callable[..., Caller]) -> None:
    home.knows("worker", "secret", "client_secret_basic")
    me = caller(grant="client_credentials", client_id="worker", client_secret="secret", scopes=["a"])
    home.needs = ("a",)
    assert await me.call() == "Bearer access-1"
    assert home.count("/authorize") == 0


@requirement("CLI-42")
async def test_a_client_for_itself_with_a_key(home: Home, caller: Callable[..., Caller]) -> None:
    key = ECKey.generate_key("P-256")
    home.knows("worker", "", "private_key_jwt", public_key=key.as_pem(private=False).decode())
    options = {"private_key": key.as_pem(private=True).decode(), "signing_algorithm": "ES256"}
    me = caller(grant="client_credentials", client_id="worker", **options)
    assert await me.call() == "Bearer access-1"


async def test_a_client_for_itself_gets_the_next_token_before_the_first_expires(
    home: Home, caller: Callable[..., Caller], clock: Clock
) -> None:
    home.knows("worker", "secret", "client_secret_basic")
    home.gives_refresh, home.lifetime = False, 60
    me = caller(grant="client_credentials", client_id="worker", client_secret="secret")
    for number in range(1, 9):
        assert await me.call(tries=1 if number > 1 else 2) == f"Bearer access-{number}"
        clock.now += 55


# Renewing


@requirement("CLI-42")
async def test_a_token_is_renewed_before_it_expires_and_the_next_refresh_token_is_kept(
    home: Home, caller: Callable[..., Caller], clock: Clock
) -> None:
    me = caller()
    assert await me.call() == "Bearer access-2"
    for number in (3, 4, 5):
        clock.now += 3580
        assert await me.call(tries=1) == f"Bearer access-{number}"
    assert home.count("/authorize") == 1


@requirement("P-26")
async def test_many_requests_renew_once(home: Home, caller: Callable[..., Caller], clock: Clock) -> None:
    me = caller()
    await me.call()
    clock.now += 3580
    assert {*await asyncio.gather(*(me.call() for _ in range(20)))} == {"Bearer access-3"}
    assert home.count("/token", grant_type="refresh_token") == 1


@requirement("P-26")
async def test_many_refusals_ask_somebody_once(home: Home, caller: Callable[..., Caller]) -> None:
    me = caller()
    assert {*await asyncio.gather(*(me.call() for _ in range(20)))} == {"Bearer access-2"}
    assert home.count("/authorize") == home.count("/register") == 1


async def test_a_refusal_that_comes_late_is_known_for_what_it_is(home: Home, caller: Callable[..., Caller]) -> None:
    me = caller()
    early = asyncio.Event()

    async def slow() -> bool:
        await me.auth.headers(home.url)
        early.set()
        await done.wait()
        return await me.auth.challenged(home.url, 401, "Bearer")

    done = asyncio.Event()
    task = asyncio.create_task(slow())
    await early.wait()
    await me.call()
    done.set()
    assert await task
    assert home.count("/token") == 1


async def test_a_refusal_of_a_token_that_was_asked_for_elsewhere_is_one_of_the_token_at_hand(
    home: Home, caller: Callable[..., Caller]
) -> None:
    me = caller()
    await me.call()
    home.issued["access-2"].expires_at = NOW
    asked = me.auth.challenged(home.url, 401, "Bearer")
    assert await asyncio.create_task(asked, context=Context())
    assert await me.auth.headers(home.url) == {"Authorization": "Bearer access-3"}


async def test_a_token_that_was_withdrawn_is_renewed_without_asking_anybody(
    home: Home, caller: Callable[..., Caller]
) -> None:
    me = caller()
    await me.call()
    home.issued["access-2"].expires_at = NOW
    assert await me.call() == "Bearer access-3"
    assert home.count("/authorize") == 1


async def test_if_the_refresh_token_is_not_good_any_more_somebody_is_asked(
    home: Home, caller: Callable[..., Caller], clock: Clock
) -> None:
    me = caller()
    await me.call()
    home.issued["access-2"].is_withdrawn = True
    clock.now += 4000
    assert await me.call() == "Bearer access-3"
    assert (home.count("/authorize"), home.count("/register")) == (2, 1)


async def test_a_refresh_token_that_was_refused_is_not_tried_again(
    home: Home, caller: Callable[..., Caller], clock: Clock
) -> None:
    me = caller()
    await me.call()
    home.issued["access-2"].is_withdrawn = True
    clock.now += 3580
    for _ in range(3):
        assert await me.call() == "Bearer access-2"  # it is good for some seconds yet
    assert home.count("/token", grant_type="refresh_token") == 1


async def test_if_the_authorization_server_is_in_trouble_nobody_is_asked(
    home: Home, caller: Callable[..., Caller], clock: Clock
) -> None:
    me = caller()
    await me.call()
    clock.now += 4000
    home.is_down = True
    with pytest.raises(AuthorizationError, match="status 503"):
        await me.call()
    home.is_down = False
    assert await me.call() == "Bearer access-3"
    assert home.count("/authorize") == 1


async def test_a_client_the_server_has_forgotten_registers_again(
    home: Home, caller: Callable[..., Caller], clock: Clock
) -> None:
    me = caller()
    await me.call()
    home.clients.clear()
    clock.now += 4000
    assert await me.call() == "Bearer access-4"
    assert home.count("/register") == 2


@requirement("P-26")
async def test_tokens_outlive_the_process_in_a_folder(
    home: Home, caller: Callable[..., Caller], clock: Clock, tmp_path: Path
) -> None:
    folder = tmp_path / "credentials"
    assert await caller(folder=folder).call() == "Bearer access-2"
    assert await caller(folder=folder, browser=never).call() == "Bearer access-2"
    clock.now += 4000
    assert await caller(folder=folder, browser=never).call() == "Bearer access-3"
    home.issued["access-3"].is_withdrawn = True
    clock.now += 4000
    assert await caller(folder=folder).call() == "Bearer access-4"
    assert home.count("/register") == 1  # also on the port that is registered
    assert (
        await caller(folder=folder, client_metadata_url="https://app.example/client.json").call() == "Bearer access-6"
    )


async def never(url: str, host: str) -> bool:
    raise AssertionError("nobody should be asked")


async def test_a_process_takes_what_another_one_got(home: Home, caller: Callable[..., Caller], tmp_path: Path) -> None:
    first, second = caller(folder=tmp_path / "x"), caller(folder=tmp_path / "x", browser=never)
    assert await second.auth.headers(home.url) == {}
    await first.call()
    assert await second.call() == "Bearer access-2"
    home.issued["access-2"].expires_at = NOW
    assert await first.call() == "Bearer access-3"
    assert await second.call() == "Bearer access-3"
    assert home.count("/token", grant_type="refresh_token") == 1


async def test_a_token_that_cannot_be_kept_is_used_all_the_same(
    home: Home, caller: Callable[..., Caller], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "credentials"

    async def spoil(url: str, host: str) -> bool:
        folder.chmod(0o755)
        return await home.agree(url, host)

    me = caller(folder=folder, browser=spoil)
    assert await me.call() == "Bearer access-2"
    assert await me.call() == "Bearer access-2"
    assert "not stored" in caplog.text and "access-2" not in caplog.text
    assert not list(folder.glob("*.json"))


async def test_a_token_that_has_expired_is_not_sent(home: Home, caller: Callable[..., Caller], clock: Clock) -> None:
    me = caller()
    home.gives_refresh, home.lifetime = False, 60
    for number in range(2, 8):  # and somebody may be asked as often as that happens
        assert await me.call() == f"Bearer access-{number}"
        clock.now += 60
        assert await me.auth.headers(home.url) == {}


async def test_if_the_registered_port_is_taken_another_is_registered(
    home: Home, caller: Callable[..., Caller], clock: Clock, tmp_path: Path
) -> None:
    home.gives_refresh = False
    assert await caller(folder=tmp_path / "x").call() == "Bearer access-2"
    (client,) = home.clients.values()
    clock.now += 4000
    taken = RedirectListener(client.about["redirect_uris"][0])
    await taken.start(any_port=False)
    assert await caller(folder=tmp_path / "x").call() == "Bearer access-4"
    await taken.close()
    assert home.count("/register") == 2


# More scopes


@requirement("CLI-42")
async def test_a_step_up_asks_for_what_is_held_and_what_is_needed(home: Home, caller: Callable[..., Caller]) -> None:
    me = caller()
    home.needs = ("read",)
    assert await me.call() == "Bearer access-2"
    home.needs = ("write",)
    assert await me.call() == "Bearer access-3"
    assert home.count("/authorize", scope="read write") == 1
    home.needs = ("read",)
    assert await me.call() == "Bearer access-3"


async def test_two_that_need_different_scopes_get_both(home: Home, caller: Callable[..., Caller]) -> None:
    me = caller()
    await me.call()
    told = 'Bearer error="insufficient_scope", scope="{}"'.format
    assert await asyncio.gather(*(me.auth.challenged(home.url, 403, told(scope)) for scope in ("a", "b"))) == [True] * 2
    home.needs = ("a", "b")
    assert await me.call(tries=1) == "Bearer access-4"


async def test_if_less_is_granted_the_server_has_to_say_what_it_thinks_of_that(
    home: Home, caller: Callable[..., Caller]
) -> None:
    me = caller()
    await me.call()
    home.needs, home.withholds = ("read", "write"), ("write",)
    assert await me.call() == "403"
    assert home.count("/authorize", scope="read write") == 2


@requirement("P-26")
async def test_more_than_the_user_allows_is_not_asked_for(home: Home, caller: Callable[..., Caller]) -> None:
    me = caller(scopes=["read"])
    home.needs = ("read",)
    await me.call()
    home.needs = ("write",)
    with pytest.raises(AuthorizationError, match="wants the scope 'write'"):
        await me.call()
    assert home.count("/authorize") == 1


@requirement("P-26")
async def test_a_server_that_wants_what_it_has_is_not_asked_again(home: Home, caller: Callable[..., Caller]) -> None:
    me = caller()
    home.needs = ("read",)
    await me.call()
    told = 'Bearer error="insufficient_scope", scope="read"'
    for challenge in (told, 'Bearer error="insufficient_scope"'):
        with pytest.raises(AuthorizationError, match="has every scope it asks for"):
            await me.auth.challenged(home.url, 403, challenge)
    assert home.count("/authorize") == 1


@requirement("P-26")
async def test_a_server_cannot_make_us_ask_for_ever(home: Home, caller: Callable[..., Caller], clock: Clock) -> None:
    me = caller()
    home.gives_refresh, home.refuses = False, True
    with pytest.raises(AuthorizationError, match="has refused 3 new tokens in 10 minutes"):
        await me.call(tries=50)
    assert home.count("/authorize") == 3
    clock.now += 600
    home.refuses = False
    home.issued.clear()
    assert await me.call() == "Bearer access-5"


@requirement("P-26")
async def test_nor_by_letting_us_refresh(home: Home, caller: Callable[..., Caller]) -> None:
    me = caller()
    home.refuses = True
    with pytest.raises(AuthorizationError, match="has refused 3 new tokens in 10 minutes"):
        await me.call(tries=50)
    assert home.count("/authorize") == home.count("/token", grant_type="refresh_token") == 3


@requirement("P-26")
async def test_nor_by_wanting_something_new_each_time(home: Home, caller: Callable[..., Caller]) -> None:
    me = caller()
    for number in range(10):
        home.needs = (f"scope-{number}",)
        assert await me.call() == f"Bearer access-{number + 2}"
    home.needs = ("scope-10",)
    with pytest.raises(AuthorizationError, match="has refused 10 new tokens"):
        await me.call()
    assert home.count("/authorize") == 10


@pytest.mark.parametrize("status", [400, 403, 404, 500])
async def test_other_refusals_are_not_about_tokens(home: Home, caller: Callable[..., Caller], status: int) -> None:
    assert not await caller(browser=never).auth.challenged(home.url, status, 'Bearer error="invalid_token"')
    assert home.asked == []


# Another authorization server


@requirement("CLI-42", "P-26")
async def test_what_one_authorization_server_gave_is_not_shown_to_another(
    home: Home, caller: Callable[..., Caller], clock: Clock
) -> None:
    async with Home(clock).running() as other:
        other.numbers = iter(range(100, 200))
        other.url = home.url
        me = caller()
        await me.call()
        home.servers, home.issued = [other.issuer], other.issued
        assert await me.call() == "Bearer access-101"
        assert other.count("/register") == 1
        said = repr(other.asked)
        assert not [secret for secret in ("client-1", "access-2", "refresh-2") if f"'{secret}'" in said]
        assert home.count("/token", grant_type="refresh_token") == 0


@requirement("P-26")
async def test_a_server_that_moves_back_finds_its_old_authorization_server_remembered(
    home: Home, caller: Callable[..., Caller], clock: Clock, tmp_path: Path
) -> None:
    async with Home(clock).running() as other:
        other.numbers, other.url, folder = iter(range(100, 200)), home.url, tmp_path / "credentials"
        await caller(folder=folder).call()
        own, home.servers, home.issued = home.issued, [other.issuer], other.issued
        assert await caller(folder=folder).call() == "Bearer access-101"
        home.servers, home.issued = [home.issuer], own
        own["access-2"].expires_at = NOW
        assert await caller(folder=folder, browser=never).call() == "Bearer access-3"


@requirement("P-26")
async def test_the_users_secret_is_for_the_authorization_server_it_was_first_shown_to(
    home: Home, caller: Callable[..., Caller], clock: Clock
) -> None:
    options = {"client_id": "mine", "client_secret": "secret"}
    home.knows("mine", "secret", "client_secret_basic")
    async with Home(clock).running() as other:
        me = caller(grant="client_credentials", **options)
        await me.call()
        home.servers, home.issued = [other.issuer], {}
        with pytest.raises(AuthorizationError, match=r"another authorization server .* give it as `issuer`"):
            await me.call()
        pinned = caller(grant="client_credentials", issuer=home.issuer, **options)
        with pytest.raises(AuthorizationError, match="does not name the authorization server of the client_id"):
            await pinned.call()
        assert {path for path, _ in other.asked} == {"/.well-known/oauth-authorization-server"}


# What goes wrong


@requirement("P-26")
async def test_somebody_says_no(home: Home, caller: Callable[..., Caller]) -> None:
    home.says_no = True
    with pytest.raises(AuthorizationError, match=r"^http://127.* authorization: .* access_denied") as raised:
        await caller().call()
    assert home.count("/token") == 0
    assert "(not sent)" not in str(raised.value)


@requirement("P-26")
async def test_without_consent_no_page_is_opened(home: Home, clock: Clock) -> None:
    auth = OAuth(clock=clock)
    with pytest.raises(AuthorizationError, match=r"nobody is there to be asked\. Give OAuth\(browser=…\)"):
        await auth.challenged(home.url, 401, "Bearer")
    refusing = OAuth(clock=clock, browser=lambda url, host: False)
    with pytest.raises(AuthorizationError, match="was not opened"):
        await refusing.challenged(home.url, 401, "Bearer")
    assert home.count("/authorize") == 0


async def test_nobody_comes_back(home: Home, caller: Callable[..., Caller]) -> None:
    async def opened(url: str, host: str) -> bool:
        return True

    with pytest.raises(AuthorizationError, match="nobody came back from 127"):
        await caller(browser=opened, timeout=0.01).call()
    with pytest.raises(AuthorizationError, match="no redirect can come back"):
        await caller(browser=opened, redirect="https://app.example/callback").call()


async def test_a_registration_is_kept_if_nobody_comes_back_and_dropped_if_that_was_why(
    home: Home, caller: Callable[..., Caller]
) -> None:
    answers = iter([False, False, True])

    async def undecided(url: str, host: str) -> bool:
        return next(answers) and await home.agree(url, host)

    me = caller(browser=undecided)
    for _ in range(2):
        with pytest.raises(AuthorizationError, match="was not opened"):
            await me.call()
        assert home.count("/register") == 1
    assert await me.call() == "Bearer access-3"
    assert home.count("/register") == 2


@requirement("P-26")
async def test_an_answer_from_elsewhere_is_not_exchanged(home: Home, caller: Callable[..., Caller]) -> None:
    async def swapped(url: str, host: str) -> str:
        there = await home.paste(url, host)
        return there.replace("127.0.0.1", "evil.example")

    with pytest.raises(AuthorizationError, match="another address"):
        await caller(browser=swapped).call()
    assert home.count("/token") == 0


@requirement("P-26")
async def test_a_code_counts_once(home: Home, caller: Callable[..., Caller]) -> None:
    codes: list[str] = []

    async def replayed(url: str, host: str) -> str:
        there = await home.paste(url, host)
        codes.append(parse_qs(urlsplit(there).query)["code"][0])
        return there.replace(codes[-1], codes[0])

    me = caller(browser=replayed)
    await me.call()
    home.issued.clear()
    with pytest.raises(AuthorizationError, match="invalid_grant") as raised:
        await me.call()
    assert not any(code in str(raised.value) for code in codes)


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({"issuer": "https://evil.example"}, "another issuer"),
        ({"code_challenge_methods_supported": ["plain"]}, "PKCE"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "https is needed"),
        ({"token_endpoint": "http://evil.example/token"}, "https is needed"),
        ({"token_endpoint": "https://169.254.169.254/token"}, "no server may send us there"),
        ({"registration_endpoint": "https://10.0.0.1/register"}, "no server may send us there"),
        ({"padding": "x" * 70_000}, "more than 65,536 bytes"),
    ],
)
@requirement("P-26", "P-27")
async def test_an_authorization_server_with_bad_metadata(
    home: Home, caller: Callable[..., Caller], metadata: dict[str, Any], complaint: str
) -> None:
    home.more_metadata = metadata
    with pytest.raises(AuthorizationError, match=complaint):
        await caller().call()
    assert home.count("/token") == 0


@pytest.mark.parametrize(
    "url", ["http://mcp.example/mcp", "ftp://mcp.example", "mcp.example", "https://a:b@mcp.example/"]
)
@requirement("P-26")
async def test_a_token_never_goes_in_the_clear(url: str) -> None:
    with pytest.raises(AuthorizationError, match="https is needed"):
        await OAuth().headers(url)


async def test_after_the_end_there_is_nothing(home: Home, caller: Callable[..., Caller]) -> None:
    opened = asyncio.Event()

    async def slow(url: str, host: str) -> bool:
        opened.set()
        await asyncio.Event().wait()
        return True

    me = caller(browser=slow)
    task = asyncio.create_task(me.call())
    await opened.wait()
    await me.auth.close()
    for waiting in (task, me.call()):
        with pytest.raises(AuthorizationError, match="closed"):
            await waiting


@pytest.mark.parametrize(
    "options",
    [
        {"scopes": "a b"},
        {"client_secret": "x"},
        {"private_key": "x", "signing_algorithm": "ES256"},
        {"client_id": "x", "private_key": "x"},
        {"grant": "client_credentials", "client_id": "x"},
        {"client_metadata_url": "http://app.example/client.json"},
        {"client_metadata_url": "https://app.example/"},
        {"redirect": "http://app.example/callback"},
        {"redirect": "http://127.0.0.1/callback"},
        {"redirect": "http://127.0.0.1:0/callback?x"},
        {"redirect": "http://127.0.0.1:0"},
        {"redirect": "javascript:alert(1)"},
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"needed|belong|together|needs|put it in a list"):
        OAuth(**options)


@requirement("P-34")
async def test_a_folder_others_can_use_is_refused_every_time(home: Home, clock: Clock, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    auth = OAuth(folder=tmp_path, clock=clock)
    for _ in range(2):
        with pytest.raises(AuthorizationError, match="can be used by others"):
            await auth.headers(home.url)


# The way back


@pytest.fixture
async def receiver() -> AsyncIterator[RedirectListener]:
    it = RedirectListener("http://127.0.0.1:0/callback")
    await it.start(any_port=False)
    yield it
    await it.close()


async def said(receiver: RedirectListener, request: str) -> str:
    """What comes back for `request`, in which {} is the host."""
    host = urlsplit(receiver.redirect).netloc
    async with asyncio.timeout(DEADLINE):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(host.partition(":")[2]))
        writer.write(request.replace("{}", host).encode())
        writer.write_eof()
        try:
            return (await reader.read()).decode()
        except ConnectionResetError:  # it had enough before it had read everything
            return ""
        finally:
            writer.close()


@requirement("P-26")
async def test_the_browser_is_told_that_it_arrived_and_nothing_else(receiver: RedirectListener) -> None:
    waiting = asyncio.create_task(receiver.wait("state"))
    await asyncio.sleep(0)
    answer = await said(receiver, "GET /callback?code=canary&state=state HTTP/1.1\r\nHost: {}\r\n\r\n")
    assert await waiting == f"{receiver.redirect}?code=canary&state=state"
    head, _, page = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK")
    for header in ("Content-Security-Policy: default-src 'none'", "Cache-Control: no-store", "Referrer-Policy: no-ref"):
        assert header in head
    assert "canary" not in answer and "<script" not in page


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET /callback?code=x&state=wrong HTTP/1.1\r\nHost: {}\r\n\r\n", "400"),
        ("GET /callback?code=x HTTP/1.1\r\nHost: {}\r\n\r\n", "400"),
        ("GET /callback?code=x&state=state&state=state HTTP/1.1\r\nHost: {}\r\n\r\n", "400"),
        ("GET /callback?code=x&state=state" + "&x=y" * 40 + " HTTP/1.1\r\nHost: {}\r\n\r\n", "400"),
        ("GET /callback/?code=x&state=state HTTP/1.1\r\nHost: {}\r\n\r\n", "404"),
        ("GET /other?code=x&state=state HTTP/1.1\r\nHost: {}\r\n\r\n", "404"),
        ("GET /favicon.ico HTTP/1.1\r\nHost: {}\r\n\r\n", "404"),
        ("POST /callback?code=x&state=state HTTP/1.1\r\nHost: {}\r\n\r\n", "404"),
        ("GET /callback?code=x&state=state HTTP/1.1\r\nHost: evil.example\r\n\r\n", "404"),
        ("GET /callback?code=x&state=state HTTP/1.1\r\nHost: {}\r\nHost: {}\r\n\r\n", "404"),
        ("GET /callback?code=x&state=state HTTP/1.1\r\n\r\n", "404"),
        ("GET /callback?code=x&state=state\r\nHost: {}\r\n\r\n", "404"),
        ("GET /callback?code=x&state=state HTTP/1.1\r\nHost: {}\r\n" + "X: y\r\n" * 10_000 + "\r\n", ""),
        ("\x16\x03\x01", ""),
        ("", ""),
    ],
)
@requirement("P-26")
async def test_whoever_else_comes_is_refused_and_the_waiting_goes_on(
    receiver: RedirectListener, request_: str, status: str
) -> None:
    waiting = asyncio.create_task(receiver.wait("state"))
    await asyncio.sleep(0)
    assert (await said(receiver, request_))[9:12] == status
    assert not waiting.done()
    await said(receiver, "GET /callback?code=x&state=state HTTP/1.1\r\nHost: {}\r\n\r\n")
    await waiting


@requirement("P-26")
async def test_p26_a_state_counts_once(receiver: RedirectListener) -> None:
    waiting = asyncio.create_task(receiver.wait("state"))
    await asyncio.sleep(0)
    good = "GET /callback?code={n}&state=state HTTP/1.1\r\nHost: {}\r\n\r\n"
    assert (await said(receiver, good.replace("{n}", "1")))[9:12] == "200"
    assert (await said(receiver, good.replace("{n}", "2")))[9:12] == "400"
    assert "code=1&" in await waiting


@requirement("P-26")
async def test_before_somebody_is_sent_away_nobody_can_come_back(receiver: RedirectListener) -> None:
    assert (await said(receiver, "GET /callback?code=x&state= HTTP/1.1\r\nHost: {}\r\n\r\n"))[9:12] == "400"


async def test_the_receiver_is_gone_when_it_is_closed() -> None:
    it = RedirectListener("http://127.0.0.1:0/callback")
    await it.start(any_port=False)
    port = urlsplit(it.redirect).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert (await said(it, "GET / HTTP/1.1\r\nHost: {}\r\n\r\n"))[9:12] == "404"  # so the one before it is in, too
    await it.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    async with asyncio.timeout(DEADLINE):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_port_that_is_taken(receiver: RedirectListener) -> None:
    with pytest.raises(AuthorizationError, match=r"the browser cannot come back to .* Give another `redirect`"):
        await RedirectListener(receiver.redirect).start(any_port=False)
    other = RedirectListener(receiver.redirect)
    await other.start(any_port=True)
    assert other.redirect != receiver.redirect
    await other.close()


async def test_too_many_at_once_are_sent_away(receiver: RedirectListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback, "MAX_CONNECTIONS", 1)
    _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(receiver.redirect).port)
    assert await said(receiver, "GET / HTTP/1.1\r\nHost: {}\r\n\r\n") == ""
    writer.close()


@pytest.mark.parametrize(
    "url", ["javascript:alert(1)", "file:///etc/passwd", "-incognito", "http://id.example/", "https://x/`id`", "--help"]
)
@requirement("P-26")
def test_only_web_pages_are_opened(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def record(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", record)
    with pytest.raises(AuthorizationError, match="https is needed"):
        open_browser(url)
    assert open_browser("https://id.example/authorize?a=b", "id.example")
    assert open_browser("http://127.0.0.1:80/authorize?a=b")
    assert opened == ["https://id.example/authorize?a=b", "http://127.0.0.1:80/authorize?a=b"]
