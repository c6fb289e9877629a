"""A server to be watched, in a process of its own: `python servers_watch.py {"metrics": "127.0.0.1:0", "workers": 2}`.

It tells on standard output where it listens, a line each.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from handrail import Server

server = Server("watched", version="1")


@server.tool
async def echo(text: str) -> str:
    """Give the text back."""
    return text


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


class Places(logging.Handler):
    """Says where else the process listens."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("http: also listening on"):
            say(str(record.args[0]) if isinstance(record.args, tuple) else "")


def main(options: dict[str, Any]) -> None:
    if "metrics" in options:
        logging.getLogger("handrail").addHandler(Places())
        logging.getLogger("handrail").setLevel(logging.INFO)
    server.run(http="127.0.0.1:0", ready=say, **options)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
