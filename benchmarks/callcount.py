"""Handrail with a counter: `callcount.py COUNT` also serves `python_calls`, the functions entered so far.

The counter sees every Python function entered in any thread, the event loop's own included. Asking before
and after some calls of `echo` gives the functions per call without looking inside the server.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from benchmarks.server_handrail import build

if __name__ == "__main__":
    entered = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        global entered
        if event == "call":
            entered += 1

    async def python_calls() -> int:
        return entered

    server = build(int(sys.argv[1]))
    server.tool(python_calls)
    threading.setprofile(profile)
    sys.setprofile(profile)
    server.run()
