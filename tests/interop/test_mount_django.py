"""A server inside of a Django project: by path, in `asgi.py`, as docs/how-to/serve-over-http.md shows it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from handrail import Call, Server
from paths import ROOT
from servers_http import Client, closed as closed, fetch
from servers_listen import listening

REVISIONS = ("2024-10-07", "2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "pocket", "2026-07-28")


@pytest.fixture(scope="module")
def project() -> None:
    """A project with one page."""
    urls = ModuleType("urls_of_the_project")
    configure = import_module("django.conf").settings.configure
    configure(ROOT_URLCONF=urls, ALLOWED_HOSTS=["127.0.0.1"], SECRET_KEY="x" * 50)
    answer = import_module("django.http").HttpResponse

    async def hello(request: Any) -> Any:
        return answer("hello from Django")

    vars(urls)["urlpatterns"] = [import_module("django.urls").path("hello", hello)]


def example() -> str:
    """The `asgi.py` of the page."""
    page = ROOT.joinpath("docs", "how-to", "serve-over-http.md").read_text("utf-8")
    (found,) = re.findall(r"^```python\n(from django\.core\.asgi .*?)^```$", page, re.MULTILINE | re.DOTALL)
    return str(found)


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    """The address of the example around a server."""
    module: dict[str, Any] = {"server": server}
    exec(example(), module)
    async with listening(module["application"], stop=module["tools"].stop) as url:
        yield url


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_server_and_a_project_share_an_address(revision: str) -> None:
    lived: list[str] = []

    @asynccontextmanager
    async def lifespan(server: Server) -> AsyncIterator[int]:
        lived.append("begun")
        yield 17
        lived.append("ended")

    server = Server("shop", lifespan=lifespan)

    @server.tool
    async def price(article: str, call: Call) -> str:
        """What an article costs."""
        return f"{article}: {call.state}"

    async with serving(server) as url:
        assert lived == ["begun"]
        client = await Client(f"{url}/mcp", revision).open()
        _, answer = await client.ask(client.call(1, "price", {"article": "tea"}))
        assert "tea: 17" in str(answer["result"])
        assert await (await fetch(f"{url}/hello", "GET")).body() == b"hello from Django"
        assert (await fetch(f"{url}/mcpx", "GET")).status == 404
    assert lived == ["begun", "ended"]
