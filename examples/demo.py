"""The everyday server over HTTP, and a gateway in front of it and two others, with their consoles: a look around.

    python examples/demo.py             until Ctrl-C; it says where the pages and the endpoints are
    SAMPLE=1 python examples/demo.py    with some calls to look at; one of them waits for your approval

Without a terminal it walks through the tools (examples/walk.py) and ends, with 0 if every answer was as expected.
DEMO_SECONDS says how long it stays, at least. What it records goes into a folder that goes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from handrail import Client, HandrailError, allow

SERVER = Path(__file__).with_name("everyday.py").resolve()
WALK = runpy.run_path(str(SERVER.with_name("walk.py")))
PORT = 8000
CONSOLE_PORT = 7421
CALLS: list[tuple[str, dict[str, object]]] = [
    ("get_weather", {"location": "Paris"}),
    ("get_weather", {"location": "Atlantis"}),
    ("query_database", {"query": "SELECT name, price FROM products", "database": "products"}),
    ("get_weather", {"location": "Tokyo", "unit": "kelvin"}),
    ("draw_chart", {"values": [3, 1, 4, 1, 5, 9, 2, 6]}),
    ("find_document", {"word": "lamps"}),
    ("calculate_sum", {"a": 2, "b": 40}),
    ("query_database", {"query": "DROP TABLE users"}),
    ("play_tone", {"frequency": 440}),
    ("read_document", {"name": "returns"}),
    ("slow_count", {"steps": 100}),
]


@contextlib.contextmanager
def served() -> Iterator[dict[str, str]]:
    """The server and the gateway, in processes of their own: their endpoints, and the links to their consoles."""
    with TemporaryDirectory(prefix="handrail-demo-", ignore_cleanup_errors=True) as folder:
        words = ["serve", str(SERVER), f"--http=127.0.0.1:{free(PORT)}", "--console"]
        with process(folder, *words) as server:
            words = ["gateway", *WALK["upstreams"](everyday=server["url"])]
            words += [f"--http=127.0.0.1:{free(PORT + 1)}", f"--console=127.0.0.1:{free(CONSOLE_PORT)}"]
            with process(folder, *words) as gateway:
                handrail(folder, "trust", "stock", "--accept")  # the others are for you to look at
                yield {**server, "gateway": gateway["url"], "gateway_console": gateway["console"]}


@contextlib.contextmanager
def process(folder: str, *words: str) -> Iterator[dict[str, str]]:
    """A process of `handrail`, and what it says when it is ready."""
    command = [sys.executable, "-m", "handrail", *words, "--json"]
    environment = {**os.environ, "XDG_STATE_HOME": folder}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", env=environment, cwd=folder)
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        if not line:
            sys.exit(f"handrail {words[0]} did not start.")
        places: dict[str, str] = json.loads(line)
        yield places
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
        started.wait()


def handrail(folder: str, *words: str) -> None:
    """Run a command of `handrail` to its end."""
    command = [sys.executable, "-m", "handrail", *words]
    environment = {**os.environ, "XDG_STATE_HOME": folder}
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, cwd=folder, check=True)


def free(port: int) -> int:
    """Return the port if it is free, else any free one."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(("127.0.0.1", port))
        except OSError:
            return 0
        return port


def tell(places: dict[str, str]) -> None:
    entry = {"mcpServers": {"everyday": {"type": "http", "url": places["url"]}}}
    print(f"Console:   {places['console']}", flush=True)
    print(f"Endpoint:  {places['url']}")
    print("For an MCP client:")
    print(json.dumps(entry, indent=2))
    print("The same server and two others behind a gateway:")
    print(f"Console:   {places['gateway_console']}")
    print(f"Endpoint:  {places['gateway']}", flush=True)


async def sample(endpoint: str, gateway: str, end: float) -> None:
    """Some calls, as an assistant would make them; and one that waits for a decision, or until the end."""
    async with (
        Client(endpoint, name="assistant", confirm=allow, timeout=600) as client,  # the server's guards ask
        Client(gateway, name="assistant", confirm=allow, timeout=600) as through,
    ):

        async def call(name: str, arguments: dict[str, object], client: Client = client) -> None:
            with contextlib.suppress(HandrailError):  # the page shows what became of it
                await client.call(name, arguments)

        waiting = [
            asyncio.create_task(call("cancel_order", {"order_id": 3})),
            asyncio.create_task(call("notes_write_note", {"name": "lamps", "text": "Two are left."}, through)),
        ]
        for article in ("lamp", "kettle", "sofa"):
            await call("stock_find_article", {"article": article}, through)
        for name, arguments in CALLS:
            await call(name, arguments)
            await asyncio.sleep(0.2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(end - time.monotonic(), 0.0)):
                await asyncio.gather(*waiting)


def main() -> int:
    stays = float(os.environ.get("DEMO_SECONDS") or 0)
    attended = sys.stdin.isatty() and sys.stdout.isatty()
    for name in ("SIGTERM", "SIGHUP"):  # what was started ends with it
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: sys.exit(128 + number))
    end, code = time.monotonic() + (stays if stays or not attended else float("inf")), 0
    try:
        with served() as places:
            tell(places)
            if attended:
                print("\nCtrl-C ends it.", flush=True)
            else:
                code = WALK["main"](str(SERVER))
            if os.environ.get("SAMPLE"):
                asyncio.run(sample(places["url"], places["gateway"], end))
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, 1.0))
    except KeyboardInterrupt:
        print()
    return code


if __name__ == "__main__":
    sys.exit(main())
