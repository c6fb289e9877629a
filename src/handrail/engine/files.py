"""The files of a folder as resources: read-only, bounded, and nothing outside the folder.

A path is opened one name at a time, relative to the folder that is open already, and no link is followed. So what is
read lies in the folder, whatever is exchanged on the disk meanwhile.
"""

from __future__ import annotations

import errno
import mimetypes
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from handrail.errors import ResourceNotFound, SchemaError, ToolError
from handrail.model import EmbeddedResource
from handrail.protocol.uri_template import UriTemplate, is_safe_path, normalize_uri, uri_problem
from handrail.suggest import expect

MAX_LISTED = 1_000  # files; those beyond can be read
MAX_SCANNED = 20_000  # entries of folders that are looked at
MAX_DEPTH = 32  # folders in one another

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG)  # ENXIO: a socket
_BINARY = ("image/", "audio/", "video/", "font/", "application/octet-stream", "application/zip", "application/pdf")
_FOLDS_CASE = sys.platform == "darwin"
_HAS_OPENAT = os.open in os.supports_dir_fd
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK if _HAS_OPENAT else 0  # to open a pipe must not wait
_FOLDER_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY if _HAS_OPENAT else 0


class FolderFile(NamedTuple):
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
            is_file = self._root.is_file()
            hint = (
                'it is a file; give its folder, and its name as pattern="…"' if is_file else "there is no such folder"
            )
            raise SchemaError(f"{where}: {hint}")
        expect(f"{where}: pattern", pattern, 'a text such as "*.md"', str)
        expect(f"{where}: max_bytes", max_bytes, "a number of bytes", int)
        if max_bytes < 1:
            raise SchemaError(f"{where}: max_bytes: {max_bytes} is less than 1")
        uri = f"file:///{quote(self._root.name)}/" if uri is None else uri
        if problem := uri_problem(uri):
            raise SchemaError(f"{where}: uri {uri!r}: {problem}")
        if not uri.endswith("/") or not normalize_uri(uri + "A").endswith("/A"):  # x:// begins a host, in any case
            raise SchemaError(f"{where}: uri {uri!r}: expected what all URIs begin with, such as 'file:///docs/'")
        self.template = UriTemplate(normalize_uri(uri) + "{+path}")
        self._pattern = pattern
        self._max_bytes = max_bytes

    def uri_of(self, path: str) -> str:
        return self.template.expand({"path": path})

    def files(self, prefix: str = "", most: int = MAX_LISTED) -> Iterator[FolderFile]:
        """Yield the files whose paths begin so, in their order; the first of them, if there are very many."""
        budget, pending, files = MAX_SCANNED, [""], list[FolderFile]()
        while pending and budget > 0:
            folder = pending.pop()
            with suppress(OSError), ExitStack() as stack:  # removed, or not readable
                descriptor = self._open(folder.split("/")[:-1], _FOLDER_FLAGS)
                stack.callback(os.close, descriptor)
                rows = [each for each in stack.enter_context(os.scandir(descriptor)) if self._is_listed(each.name)]
                budget -= len(rows)
                for each in sorted(rows, key=lambda each: each.name):
                    path = folder + each.name
                    if not f"{path}/".startswith(prefix[: len(path) + 1]):
                        continue
                    if each.is_dir(follow_symlinks=False) and path.count("/") < MAX_DEPTH:
                        pending.append(f"{path}/")
                    elif each.is_file(follow_symlinks=False) and fnmatchcase(path, self._pattern):
                        with suppress(OSError):  # removed meanwhile
                            files.append(FolderFile(path, each.stat(follow_symlinks=False).st_size))
        fitting = (each for each in sorted(files) if each.path.startswith(prefix))
        yield from islice((each for each in fitting if not uri_problem(self.uri_of(each.path))), most)

    def _is_listed(self, name: str) -> bool:
        return not name.startswith(".") and name.isprintable() and is_safe_path(name)

    def media_type(self, path: str) -> str:
        fallback = "text/markdown" if path.endswith(".md") else "application/octet-stream"
        return mimetypes.guess_type(path)[0] or fallback

    def read(self, path: str, uri: str) -> EmbeddedResource:
        """Return the whole file as text, if it is text in UTF-8, else as bytes."""
        names = path.split("/")
        if not all(map(self._is_listed, names)) or len(names) > MAX_DEPTH or not fnmatchcase(path, self._pattern):
            raise ResourceNotFound()
        try:
            data = self._read(path)
        except (OSError, ValueError) as problem:  # ValueError: a NUL
            if isinstance(problem, OSError) and problem.errno not in _ABSENT:
                raise
            raise ResourceNotFound() from None
        media_type = self.media_type(path)
        resource: dict[str, object] = {"uri": uri, "mimeType": media_type}
        if not media_type.startswith(_BINARY) or (media_type == "application/octet-stream" and b"\0" not in data):
            try:
                return EmbeddedResource({**resource, "text": data.decode()})
            except UnicodeDecodeError:
                pass
        return EmbeddedResource({**resource, "blob": data})

    def _open(self, names: list[str], flags: int) -> int:
        """Open what is below the folder under these names, one after the other; the caller closes the descriptor."""
        descriptor = os.open(self._root, _FOLDER_FLAGS)
        for depth, name in enumerate(names, 1):
            try:
                if _FOLDS_CASE and name not in os.listdir(descriptor):
                    raise FileNotFoundError(errno.ENOENT, name)
                inner = os.open(name, flags if depth == len(names) else _FOLDER_FLAGS, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = inner
        return descriptor

    def _read(self, path: str) -> bytes:
        with ExitStack() as stack:
            descriptor = self._open(path.split("/"), _FILE_FLAGS)
            stack.callback(os.close, descriptor)
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise FileNotFoundError(errno.ENOENT, path)
            if before.st_size > self._max_bytes:
                raise ToolError(f"{path} has {before.st_size:,} bytes; at most {self._max_bytes:,} can be read")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(self._max_bytes + 1)
            after = os.fstat(descriptor)
        if len(data) != before.st_size or after.st_mtime_ns != before.st_mtime_ns or after.st_size != before.st_size:
            raise ToolError(f"{path} was changed while it was read; read it again")
        return data
