"""The files of a folder as resources: read-only, bounded, and nothing beside the folder.

A path is opened one name at a time, relative to the folder that is open already, and no link is followed. So what is
read lies in the folder, whatever is exchanged on the disk meanwhile.
"""

from __future__ import annotations

import mimetypes
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from handrail.errors import ResourceNotFound, SchemaError, ToolError
from handrail.model import EmbeddedResource
from handrail.protocol.uri_template import is_safe_path, uri_problem

MAX_LISTED = 1_000  # files; those beyond can be read
MAX_SCANNED = 20_000  # entries of folders that are looked at
MAX_DEPTH = 32  # folders in one another

_BINARY = ("image/", "audio/", "video/", "font/", "application/octet-stream", "application/zip", "application/pdf")
_FOLDS_CASE = sys.platform == "darwin"
_HAS_OPENAT = os.open in os.supports_dir_fd
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK if _HAS_OPENAT else 0  # to open a pipe must not wait
_FOLDER_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY if _HAS_OPENAT else 0


class FoundFile(NamedTuple):
    path: str  # below the folder, with /
    size: int


class Folder:
    """A folder whose files can be read; those whose names, or whose folders' names, begin with a dot cannot."""

    def __init__(self, folder: str | Path, uri: str | None, pattern: str, max_bytes: int) -> None:
        self._root = Path(folder).resolve()
        where = f"add_files {str(folder)!r}"
        if not _HAS_OPENAT:
            raise SchemaError(f"{where}: this system cannot open files without following links; write a resource")
        if not self._root.is_dir():
            raise SchemaError(f"{where}: there is no such folder")
        if max_bytes < 1:
            raise SchemaError(f"{where}: max_bytes: {max_bytes} is less than 1")
        self.uri = f"file:///{quote(self._root.name)}/" if uri is None else uri
        if problem := uri_problem(self.uri):
            raise SchemaError(f"{where}: uri {self.uri!r}: {problem}")
        if not self.uri.endswith("/") or "{" in self.uri:
            raise SchemaError(f"{where}: uri {self.uri!r}: expected what all URIs begin with, such as 'file:///docs/'")
        self._pattern = pattern
        self._max_bytes = max_bytes

    def uri_of(self, path: str) -> str:
        return self.uri + quote(path)

    def files(self) -> Iterator[FoundFile]:
        """Yield the files in order of their paths; the first of them, if there are very many."""
        budget, pending, found = MAX_SCANNED, [""], list[FoundFile]()
        while pending and budget > 0:
            folder = pending.pop()
            try:
                with os.scandir(self._root / folder) as entries:
                    rows = sorted((each for each in entries if self._is_listed(each.name)), key=lambda each: each.name)
            except OSError:  # removed, or not readable
                continue
            budget -= len(rows)
            for each in rows:
                path = folder + each.name
                if each.is_dir(follow_symlinks=False) and path.count("/") < MAX_DEPTH:
                    pending.append(f"{path}/")
                elif each.is_file(follow_symlinks=False) and fnmatchcase(path, self._pattern):
                    found.append(FoundFile(path, each.stat(follow_symlinks=False).st_size))
        yield from sorted(found)[:MAX_LISTED]

    def _is_listed(self, name: str) -> bool:
        return not name.startswith(".") and name.isprintable() and is_safe_path(name)

    def media_type(self, path: str) -> str:
        known = "text/markdown" if path.endswith(".md") else "application/octet-stream"
        return mimetypes.guess_type(path)[0] or known

    def read(self, path: str, uri: str) -> EmbeddedResource:
        """Return the whole file as text, if it is text in UTF-8, else as bytes."""
        if not all(self._is_listed(name) for name in path.split("/")) or not fnmatchcase(path, self._pattern):
            raise ResourceNotFound()
        try:
            data = self._read(path)
        except (OSError, ValueError):  # ValueError: a NUL
            raise ResourceNotFound() from None
        media_type = self.media_type(path)
        resource: dict[str, object] = {"uri": uri, "mimeType": media_type}
        if not media_type.startswith(_BINARY) or (media_type == "application/octet-stream" and b"\0" not in data):
            try:
                return EmbeddedResource({**resource, "text": data.decode()})
            except UnicodeDecodeError:
                pass
        return EmbeddedResource({**resource, "blob": data})

    def _read(self, path: str) -> bytes:
        *folders, name = path.split("/")
        with ExitStack() as stack:

            def enter(entry: str | Path, flags: int, within: int | None = None) -> int:
                if _FOLDS_CASE and within is not None and entry not in os.listdir(within):
                    raise FileNotFoundError(entry)
                descriptor = os.open(entry, flags, dir_fd=within)
                stack.callback(os.close, descriptor)
                return descriptor

            within = enter(self._root, _FOLDER_FLAGS)
            for folder in folders:
                within = enter(folder, _FOLDER_FLAGS, within)
            descriptor = enter(name, _FILE_FLAGS, within)
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise FileNotFoundError(name)
            if before.st_size > self._max_bytes:
                raise ToolError(f"{path} has {before.st_size:,} bytes; at most {self._max_bytes:,} can be read")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(self._max_bytes + 1)
            after = os.fstat(descriptor)
        if len(data) != before.st_size or after.st_mtime_ns != before.st_mtime_ns or after.st_size != before.st_size:
            raise ToolError(f"{path} was changed while it was read; read it again")
        return data
