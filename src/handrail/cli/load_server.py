"""A server in a Python file: found, imported, and imported again when the file has changed."""

from __future__ import annotations

import sys
import traceback
from importlib import invalidate_caches
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, TracebackType

from handrail.cli.exit_codes import UsageError
from handrail.schema.explain import closest
from handrail.server import Server

__all__ = ["ServerFile"]

Stamp = tuple[int, int, int]


class ServerFile:
    """`FILE[:OBJECT]`. To load it is to import it: its folder is on the path, and it is not `__main__`."""

    def __init__(self, target: str) -> None:
        file, colon, name = target.rpartition(":")
        if not colon or not name.isidentifier() or len(file) < 2 or Path(target).is_file():  # "C:server" is a file
            file, name = target, ""
        self.path = Path(file).absolute()
        self.object = name
        self.label = file
        stem = self.path.stem
        is_reserved = stem in sys.modules or stem in sys.stdlib_module_names or not stem.isidentifier()
        self._module = f"handrail_served_{stem}" if is_reserved else stem
        self._stamps: dict[Path, Stamp] = {}
        self._broken = False

    def load(self) -> Server:
        """The server as the file has it now; anything in the way of it is a `UsageError`.

        The next time, every module from the file's folder is read anew; if that fails, those that were stay.
        """
        before, stamps = self._modules(), self._file_stamps(everything=True)
        for name in before:
            del sys.modules[name]
        invalidate_caches()  # of what is in the folder
        self._broken = True
        try:
            server = self._server(self._import())
            server.engine.guard_set.served_file = str(self.path.resolve())
            self._broken = False
            return server
        finally:
            if self._broken:
                for name in self._modules():
                    del sys.modules[name]
                sys.modules.update(before)
            now = self._file_stamps(
                everything=self._broken
            )  # what is missing or wrong may be mended in any file beside
            # As they were before they were read: what has changed since is a change.
            self._stamps = now | {path: stamp for path, stamp in stamps.items() if path in now}

    def has_changed(self) -> bool:
        """Whether a file that the server was made from has changed since it was loaded, or since this was asked."""
        now, before = self._file_stamps(everything=self._broken), self._stamps
        self._stamps = before | now  # a file that is gone is being replaced
        return any(before.get(path, None if self._broken else stamp) != stamp for path, stamp in now.items())

    def _file_stamps(self, *, everything: bool) -> dict[Path, Stamp]:
        """The files as they are: ours, or all there are in the folder as well."""
        files = {self.path, *(Path(module.__file__) for module in self._modules().values() if module.__file__)}
        if everything:
            files.update(self.path.parent.glob("*.py"))
        return {path: stamp for path in files if (stamp := _stamp(path))}

    def _modules(self) -> dict[str, ModuleType]:
        return {name: module for name, module in list(sys.modules.items()) if self._is_ours(name, module)}

    def _is_ours(self, name: str, module: ModuleType) -> bool:
        if name == self._module:
            return True
        file, top = getattr(module, "__file__", None), name.partition(".")[0]
        if not file or top in ("handrail", "__main__") or top in sys.stdlib_module_names:
            return False
        path, folder = Path(file), self.path.parent
        between = path.relative_to(folder).parts if path.is_relative_to(folder) else (".",)
        # An environment in the folder is not of the folder.
        return not any(part.startswith(".") or part.endswith("-packages") for part in between)

    def _import(self) -> ModuleType:
        if not self.path.is_file():
            kind = "a folder; name a Python file in it" if self.path.is_dir() else "no such file"
            raise UsageError(f"{self.label}: {kind}")
        if (folder := str(self.path.parent)) not in sys.path:
            sys.path.insert(0, folder)
        loader = SourceFileLoader(self._module, str(self.path))
        spec = spec_from_file_location(self._module, self.path, loader=loader)
        assert spec is not None
        module = sys.modules[self._module] = module_from_spec(spec)
        try:
            loader.exec_module(module)
        except (Exception, SystemExit) as problem:
            problem.__traceback__ = _user_frames(problem.__traceback__)
            traceback_text = "".join(traceback.format_exception(problem))
            raise UsageError(f"{self.label}: cannot be imported: {type(problem).__name__}", traceback_text) from None
        return module

    def _server(self, module: ModuleType) -> Server:
        names = vars(module)
        names_by_server: dict[Server, str] = {}
        for name, value in names.items():
            if isinstance(value, Server):
                names_by_server.setdefault(value, name)
        if self.object and self.object not in names:
            near = closest(self.object, names)
            servers = f"; there are the servers {', '.join(names_by_server.values())}" if names_by_server else ""
            hint = f"; did you mean {near!r}?" if near else servers
            raise UsageError(f"{self.label}: there is no {self.object!r} in it{hint}")
        if self.object:
            value = names[self.object]
            if isinstance(value, Server):
                return value
            servers = f"; {', '.join(names_by_server.values())} would be one" if names_by_server else ""
            raise UsageError(f"{self.label}:{self.object} is a {type(value).__name__}, not a Server{servers}")
        if not names_by_server:
            raise UsageError(f'{self.label}: no Server in it; `server = Server("name")` at its top level makes one')
        if len(names_by_server) > 1:
            listed = ", ".join(f"{self.label}:{name}" for name in names_by_server.values())
            raise UsageError(f"{self.label}: {len(names_by_server)} servers in it; say which one: {listed}")
        return next(iter(names_by_server))


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """The frames of the file and below: how it came to be imported tells its author nothing."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith((__file__, "<frozen importlib")):
        frames = frames.tb_next
    return frames
