"""`[upstreams.NAME.auth]`: how a gateway shows an upstream server who it is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest

from authorized_upstream import Upstream, authorized_upstream, name_of
from cli_runs import COMMAND, environment, handrail
from handrail import Client, Elicitation
from handrail.auth import ApiKeys
from patience import PATIENCE
from requirements import requirement

SECRET = "canary-7c1b9e0a55d14f"  # in the clear nowhere
ENVIRONMENT = {"GATEWAY_SECRET": SECRET}


def write(home: Path, url: str, auth: str) -> None:
    (home / "handrail.toml").write_text(f'[upstreams.box]\nurl = "{url}"\ntrusted = true\n[upstreams.box.auth]\n{auth}')


async def run(home: Path, *words: str, **env: str) -> CompletedProcess[str]:
    return await asyncio.to_thread(handrail, *words, home=home, env=env or ENVIRONMENT)


async def call(upstream: Upstream, home: Path, auth: str) -> tuple[str, str]:
    """What a call of the tool returns, and what the gateway writes to standard error."""
    write(home, upstream.url, auth)
    agreed = await run(home, "gateway", "--agree", "--yes")
    assert agreed.returncode == 0, agreed.stderr
    lines: list[str] = []
    env = environment(home, **ENVIRONMENT)
    async with Client([*COMMAND, "gateway"], env=env, cwd=home, on_stderr=lines.append) as client:
        return (await client.call("box_whoami")).text, "\n".join(lines)


@requirement("GW-08", "P-24", everywhere=True)
@pytest.mark.parametrize("place", ["variable", "file"])
async def test_a_gateway_has_a_token_of_its_own_by_client_credentials(tmp_path: Path, place: str) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    where = 'client_secret = "${GATEWAY_SECRET}"' if place == "variable" else 'client_secret_file = "secret"'
    auth = f'grant = "client_credentials"\nclient_id = "worker"\n{where}\nscopes = ["a"]\naudience = "box"\n'
    async with authorized_upstream() as upstream:
        upstream.home.knows("worker", SECRET, "client_secret_basic")
        text, stderr = await call(upstream, tmp_path, auth)
        [(token, _)] = upstream.seen
        assert text == name_of(token)
        assert upstream.home.count("/token", scope="a", audience="box", resource=upstream.url) == 1
        check = await run(tmp_path, "check", "--json")
        for shown in (stderr, check.stdout, check.stderr):
            assert SECRET not in shown and token not in shown


async def test_a_secret_of_the_environment_goes_nowhere_without_consent(tmp_path: Path) -> None:
    async with authorized_upstream() as upstream:
        write(
            tmp_path, upstream.url, 'grant = "client_credentials"\nclient_id = "x"\nclient_secret = "${GATEWAY_SECRET}"'
        )
        refused = await run(tmp_path, "gateway")
        assert refused.returncode != 0 and "nobody has agreed" in refused.stderr
        await run(tmp_path, "gateway", "--agree", "--yes")
        other = await run(tmp_path, "gateway", GATEWAY_SECRET="another")
        assert "nobody has agreed" in other.stderr and not upstream.home.count("/token")


WORKER = 'grant = "client_credentials"\nclient_id = "x"\n'
MISTAKES = [
    ('grant = "client_credential"', "auth.grant: 'client_credential' is not one of client_credentials, user"),
    ('client_id = "x"', "upstreams.box.auth: `grant` is missing"),
    (f'{WORKER}clientid = "x"', "upstreams.box.auth.clientid: unknown key; did you mean 'client_id'"),
    (f"{WORKER}client_secret = 5", "upstreams.box.auth.client_secret: expected a text, got a whole"),
    (WORKER, "client_credentials needs a client_id, and a client_secret"),
    (f'{WORKER}client_secret = "${{NOT_SET}}"', "the variable NOT_SET is not set"),
    (f'{WORKER}client_secret_file = "none"', "auth: client_secret_file: "),
    (
        f'{WORKER}client_secret = "${{GATEWAY_SECRET}}"\nclient_secret_file = "s"',
        "auth: client_secret and client_secret_file: choose one of them",
    ),
]


@pytest.mark.parametrize(("auth", "text"), MISTAKES)
async def test_a_mistake_is_named_with_its_place_and_without_the_secret(tmp_path: Path, auth: str, text: str) -> None:
    write(tmp_path, "http://127.0.0.1:9/mcp", auth)
    await run(tmp_path, "gateway", "--agree", "--yes")
    done = await run(tmp_path, "gateway")
    assert done.returncode != 0
    assert text in done.stderr and SECRET not in done.stdout + done.stderr


async def test_a_command_has_no_authorization_over_http(tmp_path: Path) -> None:
    lines = ["[upstreams.box]", 'command = "python x.py"', "[upstreams.box.auth]", 'grant = "client_credentials"']
    (tmp_path / "handrail.toml").write_text("\n".join(lines))
    done = await run(tmp_path, "gateway")
    assert "upstreams.box.auth: a command has no authorization over HTTP; use env" in done.stderr


async def test_a_secret_in_the_file_is_not_shown_by_check(tmp_path: Path) -> None:
    write(tmp_path, "http://127.0.0.1:9/mcp", f'{WORKER}client_secret = "{SECRET}"')
    done = await run(tmp_path, "check", "--json")
    assert '"client_id": "x"' in done.stdout and SECRET not in done.stdout + done.stderr


async def test_over_stdio_each_user_of_a_machine_signs_in_once_and_the_next_process_goes_on(tmp_path: Path) -> None:
    async with authorized_upstream() as upstream:
        write(tmp_path, upstream.url, 'grant = "user"\nscopes = ["write"]')
        await run(tmp_path, "gateway", "--agree", "--yes")
        env, stderr = environment(tmp_path, **ENVIRONMENT), list[str]()
        visited: list[str] = []

        async def visit(question: Elicitation) -> bool:
            visited.append(question.url)
            return await upstream.home.agree(question.url, urlsplit(question.url).netloc)

        def client(**options: Any) -> Client:
            return Client([*COMMAND, "gateway"], env=env, cwd=tmp_path, on_stderr=stderr.append, **options)

        async with client(elicit_url=visit) as one:
            assert [tool.name for tool in await one.tools()] == ["sign_in_to_box"]
            assert (await one.call("sign_in_to_box")).text == "You are signed in to box."
            name = (await one.call("box_whoami")).text
            assert [tool.name for tool in await one.tools()] == ["box_whoami", "box_hold", "box_write"]
        async with client() as other:
            assert (await other.call("box_whoami")).text == name
        [url] = visited
        redirect = parse_qs(urlsplit(url).query)["redirect_uri"][0]
        assert urlsplit(redirect).hostname == "127.0.0.1" and upstream.home.count("/authorize", scope="write") == 1
        assert not [token for token in upstream.tokens if token in "\n".join(stderr)]
        listed = await run(tmp_path, "grants", "--json")
        assert '"caller": "local"' in listed.stdout
        assert (await run(tmp_path, "grants", "--revoke", "box", "--caller", "local")).returncode == 0
        assert (await run(tmp_path, "grants", "--revoke", "box", "--caller", "local")).returncode != 0
        async with client() as again:
            refused = await again.call("box_whoami")
            assert refused.is_error and "call sign_in_to_box" in refused.text


@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_workers_of_one_gateway_share_the_sign_ins(tmp_path: Path, revision: str) -> None:
    key, stored = ApiKeys.new()
    async with authorized_upstream() as upstream:
        write(tmp_path, upstream.url, 'grant = "user"')
        with (tmp_path / "handrail.toml").open("a") as file:
            file.write(f'\n[http]\nlisten = "127.0.0.1:0"\nworkers = 2\n[identities.keys]\nalice = "{stored}"\n')
        await run(tmp_path, "gateway", "--agree", "--yes")
        codes: list[str] = []

        async def visit(question: Elicitation) -> bool:
            back = await upstream.home.paste(question.url, urlsplit(question.url).netloc)
            async with aiohttp.ClientSession() as session, session.get(back) as response:
                codes.extend(re.findall("<h1>(.*)</h1>", await response.text()))
            return True

        async with started("gateway", home=tmp_path) as url:
            headers = {"Authorization": f"Bearer {key}"}
            options: Any = {"headers": headers, "revision": revision, "elicit": lambda form: {"code": codes[-1]}}
            async with Client(url, elicit_url=visit, **options) as client:
                assert (await client.call("sign_in_to_box")).text == "You are signed in to box."
            names = set()
            for _ in range(6):  # a connection of its own each, at either worker
                async with Client(url, headers=headers, revision=revision) as client:
                    names.add((await client.call("box_whoami")).text)
            assert len(names) == 1 and len(codes) == 1


@asynccontextmanager
async def started(*words: str, home: Path) -> AsyncIterator[str]:
    """The URL of a command that listens."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *words, cwd=home, env=environment(home), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE):
            async for line in process.stderr:
                if match := re.search(rb"http://\S+/mcp", line):
                    break
            else:
                raise AssertionError("it ended before it listened")
        yield match[0].decode()
    finally:
        process.terminate()
        await process.communicate()
