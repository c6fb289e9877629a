"""Write web/src/hidden.ts: the characters that act or hide, as text/controls.py knows them, for the console's page.

python tools/hidden.py            writes the file
python tools/hidden.py --check    says whether it is what it should be
"""

from __future__ import annotations

import sys
from pathlib import Path

from handrail.text import controls as inert

FILE = Path(__file__).parents[1] / "web" / "src" / "hidden.ts"


def script(pattern: str) -> str:
    """A pattern as JavaScript writes it, in ASCII only."""
    return "".join(char if " " <= char <= "~" else f"\\u{{{ord(char):x}}}" for char in pattern)


def text() -> str:
    """What the file should be."""
    first = inert._first(True).pattern
    each = f"{inert._NEEDLESS}|(?:(?![{inert._NEEDED}]){first})+"
    return (
        "// Made by tools/hidden.py from src/handrail/text/controls.py. Do not edit.\n\n"
        "/** Finds whether a text has anything that acts or hides. */\n"
        f"export const FIRST = /{script(first)}/u;\n\n"
        "/** Finds each run of it; emoji and spelling keep what they need. */\n"
        f"export const EACH = /{script(each)}/gsu;\n"
    )


def main() -> int:
    if "--check" not in sys.argv:
        FILE.write_text(text(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text():
        print(f"{FILE.name} is not what text/controls.py says: run python tools/hidden.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
