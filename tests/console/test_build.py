"""The built page is that of its sources, small where somebody waits for it, whole, and in the wheel."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from paths import ROOT

STATIC = ROOT / "src" / "handrail" / "console" / "static"
MAX_BYTES = 60_000  # of what a browser loads until Now is there, compressed
NAMED = re.compile(r'(?:href|src)="\./assets/([^"]+)"')
AT_ONCE = re.compile(r"""(?:\bfrom|\bimport) ?["'`]\./([\w.-]+)["'`]""")  # by a script, before it runs
# That of resources has prompts too.
SCREENS = ("now", "tools", "resources", "try", "approve", "call", "audit", "upstreams", "connections")
LATER = re.compile(r"""\bimport\(["'`]\./([\w.-]+)["'`]\)""")  # when a screen is first looked at


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_page_is_built_from_its_sources(tmp_path: Path, installed_peer: Callable[[str], Path]) -> None:
    modules = installed_peer("web") / "node_modules"
    web = tmp_path / "web"
    shutil.copytree(ROOT / "web", web, ignore=shutil.ignore_patterns("node_modules"))
    (web / "node_modules").symlink_to(modules)
    built = subprocess.run(["npm", "run", "build"], cwd=web, capture_output=True, encoding="utf-8", timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    made, kept = files(tmp_path / "src" / "handrail" / "console" / "static"), files(STATIC)
    differing = [name for name in sorted(made.keys() | kept.keys()) if made.get(name) != kept.get(name)]
    assert not differing, f"{differing} are not what the sources give: run `make console` and commit"


def assets() -> dict[str, bytes]:
    return files(STATIC / "assets")


def with_imports(names: set[str], what: re.Pattern[str] = AT_ONCE) -> set[str]:
    """These files, and all that they cannot do without."""
    found: set[str] = set()
    while names:
        found |= names
        scripts = [assets()[name].decode() for name in names if name.endswith(".js")]
        names = {each for script in scripts for each in what.findall(script)} - found
    return found


def test_what_is_loaded_for_the_first_screen_is_small(record_property: Callable[[str, object], None]) -> None:
    """The page itself, all it names (style sheet, script, icon), the script of Now, and what those two import."""
    page = (STATIC / "index.html").read_bytes()
    named = set(NAMED.findall(page.decode()))
    assert named == {"console.js", "console.css", "icon.svg"}
    loaded = {name: assets()[name] for name in with_imports({*named, "now.js"})}
    assert b"u-cursor-pt" in loaded["now.js"], "the charts are a part of it"
    sizes = {name: len(gzip.compress(data, mtime=0)) for name, data in {"index.html": page, **loaded}.items()}
    record_property("bytes", sizes)
    assert sum(sizes.values()) < MAX_BYTES, sizes


def test_each_screen_is_a_file_of_its_own_and_no_file_is_left_over() -> None:
    first = with_imports({"console.js"})
    later = set(LATER.findall(assets()["console.js"].decode()))
    assert later == {f"{name}.js" for name in SCREENS}
    assert not first & later, "a screen that nobody looks at is not loaded"
    for screen in later:
        assert not (with_imports({screen}) - {screen}) & later, f"{screen} needs no other screen"
    known = with_imports(first | later) | {"console.css", "icon.svg", "licences.txt"}
    assert known == set(assets())


def test_the_licences_of_what_is_in_it_are_with_it() -> None:
    """MIT: the notice goes wherever the code goes."""
    packages = json.loads((ROOT / "web" / "package.json").read_text("utf-8"))["devDependencies"]
    tools = {"axe-core", "typescript", "vite"}  # nothing of these is in what is built
    said = assets()["licences.txt"].decode()
    assert set(packages) - tools == {"preact", "uplot"}
    for name, holder in (("Preact", "Jason Miller"), ("uPlot", "Leon Sorokin")):
        assert re.search(rf"^{name}, in \w+\.js: Copyright \(c\) .*{holder}$", said, re.MULTILINE)
    assert "Permission is hereby granted, free of charge" in said
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in packages.values()), "exact versions"


def test_it_is_in_the_wheel(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name.removeprefix("handrail/console/static/") for name in archive.namelist() if "/static/" in name}
    assert packed == set(files(STATIC))
