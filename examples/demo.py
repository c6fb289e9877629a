"""The everyday server over HTTP, with its console beside it: a look around.

    python examples/demo.py             until Ctrl-C; it says where the page and the endpoint are
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
PORT = 8000
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
def served() -> Iterator[tuple[str, str]]:
    """The server in a process of its own; its endpoint, and the link to its console."""
    with TemporaryDirectory(prefix="handrail-demo-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "handrail", "serve", str(SERVER), "--json"]
        command += [f"--http=127.0.0.1:{free(PORT)}", "--console"]
        environment = {**os.environ, "XDG_STATE_HOME": folder}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", env=environment, cwd=folder)
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said:
                sys.exit("The server did not start.")
            told = json.loads(said)
            yield told["url"], told["console"]
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait()


def free(port: int) -> int:
    """Return the port if it is free, else any free one."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(("127.0.0.1", port))
        except OSError:
            return 0
        return port


def tell(endpoint: str, link: str) -> None:
    entry = {"mcpServers": {"everyday": {"type": "http", "url": endpoint}}}
    print(f"Console:   {link}", flush=True)
    print(f"Endpoint:  {endpoint}")
    print("For an MCP client:")
    print(json.dumps(entry, indent=2), flush=True)


async def sample(endpoint: str, end: float) -> None:
    """Some calls, as an assistant would make them; and one that waits for a decision, or until the end."""
    async with Client(endpoint, name="assistant", confirm=allow, timeout=600) as client:  # the server's guards ask

        async def call(name: str, arguments: dict[str, object]) -> None:
            with contextlib.suppress(HandrailError):  # the page shows what became of it
                await client.call(name, arguments)

        waiting = asyncio.create_task(call("cancel_order", {"order_id": 3}))
        for name, arguments in CALLS:
            await call(name, arguments)
            await asyncio.sleep(0.2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(end - time.monotonic(), 0.0)):
                await waiting


def main() -> int:
    stays = float(os.environ.get("DEMO_SECONDS") or 0)
    attended = sys.stdin.isatty() and sys.stdout.isatty()
    for name in ("SIGTERM", "SIGHUP"):  # what was started ends with it
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, frame: sys.exit(128 + number))
    end, code = time.monotonic() + (stays if stays or not attended else float("inf")), 0
    try:
        with served() as (endpoint, link):
            tell(endpoint, link)
            if attended:
                print("\nCtrl-C ends it.", flush=True)
            else:
                walk = runpy.run_path(str(SERVER.with_name("walk.py")))
                code = walk["main"](str(SERVER))
            if os.environ.get("SAMPLE"):
                asyncio.run(sample(endpoint, end))
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(left, 1.0))
    except KeyboardInterrupt:
        print()
    return code


if __name__ == "__main__":
    sys.exit(main())
