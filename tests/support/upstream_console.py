"""An upstream for the tests of the console: JSON-RPC as it is on the wire, over standard input and output.

`upstream_console.py FILE [REVISION]`: FILE is `{"tools": [...], "stderr": [...]}`, and is read at each list.
A call of `hold` waits until the file that its argument names is there; `die` ends the process; others answer.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

PLAN = Path(sys.argv[1])
REVISION = sys.argv[2] if len(sys.argv) > 2 else "2025-06-18"
SERVER = {"name": "rig", "version": "1"}


def plan() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PLAN.read_text("utf-8"))
    return found


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def call(ident: Any, params: dict[str, Any]) -> None:
    arguments = params.get("arguments", {})
    if params["name"] == "die":
        sys.exit("it ends in the middle of a call")
    if params["name"] == "hold":
        while not Path(arguments["gate"]).exists():
            time.sleep(0.01)
    text = json.dumps(arguments)
    send({"id": ident, "result": {"content": [{"type": "text", "text": text}], "structuredContent": arguments}})


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        method, ident = message.get("method"), message.get("id")
        if method == "initialize":
            result = {"protocolVersion": REVISION, "capabilities": {"tools": {}}, "serverInfo": SERVER}
            send({"id": ident, "result": result})
        elif method == "tools/list":
            for line in plan().get("stderr", []):
                print(line, file=sys.stderr, flush=True)
            send({"id": ident, "result": {"tools": plan()["tools"]}})
        elif method == "tools/call" and message["params"]["name"] == "hold":
            threading.Thread(target=call, args=(ident, message["params"]), daemon=True).start()
        elif method == "tools/call":
            call(ident, message["params"])
        elif ident is not None:
            send({"id": ident, "error": {"code": -32601, "message": f"{method} is unknown"}})


main()
