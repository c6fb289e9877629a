"""The built page is that of its sources, is small, and is in the wheel."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "src" / "handrail" / "console" / "static"
MAX_BYTES = 60 * 1024  # of all that a browser loads, compressed


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


def test_it_is_small() -> None:
    sizes = {name: len(gzip.compress(data, mtime=0)) for name, data in files(STATIC).items()}
    assert "index.html" in sizes
    assert sum(sizes.values()) < MAX_BYTES, sizes


def test_it_is_in_the_wheel(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name.removeprefix("handrail/console/static/") for name in archive.namelist() if "/static/" in name}
    assert packed == set(files(STATIC))
