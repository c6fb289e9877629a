"""The page of the console shows the same characters as the terminal does (P-33)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from handrail.text.controls import escape
from paths import ROOT

HIDDEN = ROOT / "web" / "src" / "hidden.ts"

SHOW = """
const text = require("fs").readFileSync(process.argv[1], "utf8").replace(/export const/g, "var");
const { FIRST, EACH } = new Function(text + "; return { FIRST, EACH };")();
const name = (char) => {
  const code = char.codePointAt(0);
  if (char === "\\r") return "\\\\r";
  return code < 0xa0 ? "\\\\x" + code.toString(16).padStart(2, "0")
    : "<U+" + code.toString(16).toUpperCase().padStart(4, "0") + ">";
};
const shown = (text) => !FIRST.test(text) ? text
  : text.replace(/\\r\\n/g, "\\n").replace(EACH, (run) => [...run].map(name).join(""));
const texts = JSON.parse(require("fs").readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(texts.map(shown)));
"""

TEXTS = [
    "plain",
    "a\u202eb\u202c",
    "zero\u200bwidth",
    "\x1b[31mred\x1b[0m",
    "line\r\nbreak\rback",
    "👨‍👩‍👧 ❤️ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "می‌خواهم",
    "क्‍ष",
    "x\u200dy",
    "\ufeff\u2028\u2029\u00ad\u3164",
    "\U000e0041\U000e0042",
    "\ue000\U000f0000\ufffe",
    "\ud800",
]


def test_p33_the_page_has_the_table_of_the_package() -> None:
    made = subprocess.run([sys.executable, ROOT / "tools" / "hidden.py", "--check"], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.skipif(not shutil.which("node"), reason="needs Node")
def test_p33_the_page_shows_what_the_terminal_shows() -> None:
    every = [chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000]
    texts = [*TEXTS, *(f"a{char}b" for char in every)]
    node = subprocess.run(
        ["node", "-e", SHOW, HIDDEN], input=json.dumps(texts), capture_output=True, text=True, check=True
    )
    assert json.loads(node.stdout) == [escape(text) for text in texts]


def test_the_built_page_asks_nobody_else() -> None:
    """No address of another host in what is shipped, but a namespace and an example in a field."""
    static = ROOT / "src" / "handrail" / "console" / "static"
    for file in sorted(static.rglob("*.*")):
        found = set(re.findall(r"https?://[\w.-]+", file.read_text(encoding="utf-8")))
        assert found <= {"http://www.w3.org", "https://example.org"}, (file.name, found)
