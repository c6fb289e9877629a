"""Addresses, limits and TLS of the listener."""

from __future__ import annotations

import logging
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from handrail.transports.http1.listen import Address, HttpLimits
from patience import PATIENCE
from requirements import requirement
from servers_listen import App, listening
from wires_http1 import certificate, connected, get, listener, posix, post, served

__all__ = ["certificate"]  # a fixture


@requirement("SRV-202")
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8000", Address("127.0.0.1", 8000)),
        (":8000", Address("127.0.0.1", 8000)),
        ("[::1]:8000", Address("::1", 8000)),
        ("localhost:0", Address("localhost", 0)),
        ("unix:/run/x.sock", Address(path="/run/x.sock")),
    ],
)
def test_address_text_is_parsed(text: str, address: Address) -> None:
    assert Address.parse(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "8000", "localhost", "localhost:", "a:b", "a:-1", "a:65536", "a:٣", "::1:80", "[::1]", "[x]:80"),
        *("http://a:80", "a:80/mcp", "http://localhost:80/", "u@a:80", "unix", "unix:", "unix:\0x"),
    ],
)
def test_wrong_addresses_are_explained(text: str) -> None:
    with pytest.raises(ValueError, match=r"write |is not an IPv6 address") as problem:
        Address.parse(text)
    assert repr(text) in str(problem.value)


@requirement("SRV-202")
@pytest.mark.parametrize("address", [":0", "localhost:0", "[::1]:0", "0.0.0.0:0"])
async def test_only_an_address_of_all_interfaces_is_warned_of(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "handrail"):
        try:
            async with listener(address=address) as url, connected(url) as wire:
                assert await wire.text(post("echo", b"x")) == "1 one x"
        except OSError as problem:
            pytest.skip(f"no {address} here: {problem}")
    warned = [record.getMessage() for record in caplog.records if "all interfaces" in record.getMessage()]
    assert len(warned) == (1 if address.startswith("0") else 0)


async def test_address_in_use_raises_cannot_listen() -> None:
    async with listener() as url:
        with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1:"):
            async with listener(address=url.removeprefix("http://")):
                pass


@posix
async def test_a_unix_socket_is_made_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()  # as a process leaves it that was killed
    async with listener(address=f"unix:{path}") as url, connected(url) as wire:
        assert url == f"unix:{path}"
        assert await wire.text(post("echo", b"x")) == "1 one x"
        with pytest.raises(OSError, match="another process listens there"):
            async with listener(address=f"unix:{path}"):
                pass
        assert await wire.text(post("echo", b"x")) == "1 one x"
        assert path.exists()
    assert not path.exists()
    path.write_text("a file of somebody's")
    with pytest.raises(OSError, match="in use"):
        async with listener(address=f"unix:{path}"):
            pass
    assert path.exists()


@posix
@requirement("P-11")
async def test_tls_connection_is_served(certificate: tuple[str, str]) -> None:
    trusting = ssl.create_default_context(cafile=certificate[0])
    limits = {"header_seconds": 0.5}
    async with served(certificate=certificate[0], key=certificate[1], limits=limits) as server:
        assert server.url.startswith("https://")
        async with connected(server.url) as silent:
            assert await silent.rest() == b""  # no handshake is waited for either
        async with connected(server.url, ssl=trusting) as wire:
            assert await wire.text(post("echo", b"x")) == "1 one x"
            await wire.send(get("echo", "Host: b"))
            await wire.refused(400)
        async with connected(server.url, ssl=trusting) as wire:
            await wire.send(get("wait"))
            await server.says("running")
            server.process.send_signal(signal.SIGTERM)
            assert (await wire.answer()).body == b"waited"
        assert await server.ended(5) == 0


async def test_wrong_certificate_is_refused_before_listening(tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    for path, key, text in ((nothing, None, "cannot use the certificate"), (None, nothing, "no certificate")):
        with pytest.raises(ValueError, match=text):
            async with listening(App(), certificate=path, key=key):
                pass


@pytest.mark.parametrize("name", HttpLimits.__struct_fields__)
def test_limit_of_zero_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 0 is not more than 0"):
        HttpLimits(**{name: 0})


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("sys.modules['uvicorn'] = None", "python -m pip install 'uvicorn"),
        ("sys.modules['httptools'] = None", "python -m pip install 'uvicorn"),
    ],
)
def test_missing_package_is_reported_in_one_line(before: str, told: str) -> None:
    code = f"import sys; {before}; from handrail import Server; Server('x').run(http=':0')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert ran.returncode == 1
    assert told in ran.stderr.strip().split("\n")[-1]
