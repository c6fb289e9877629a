"""Public names that are imported from their modules at first use, so that the import of a package stays cheap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package whose public names stand in other modules.

    `modules` maps a module of handrail to the names it defines, separated by spaces.
    """
    module_of = {name: f"handrail.{module}" for module, names in modules.items() for name in names.split()}
    namespace = vars(import_module(package))

    def resolve(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(module_of[name]), name)
        return value

    return sorted(module_of), resolve, lambda: sorted({*namespace, *module_of})
