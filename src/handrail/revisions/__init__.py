"""The table of revisions. Other packages import no single revision."""

from __future__ import annotations

from collections.abc import Iterable

from handrail.revisions import pocket, r2024_10_07, r2024_11_05, r2025_03_26, r2025_06_18, r2025_11_25, r2026_07_28
from handrail.revisions.base import Revision
from handrail.suggest import texts

__all__ = ["REVISIONS", "Offer", "Revision"]

# Oldest first. Names are never compared: the order of this table is the order.
REVISIONS: dict[str, Revision] = {
    each.REVISION.name: each.REVISION
    for each in (r2024_10_07, r2024_11_05, r2025_03_26, r2025_06_18, r2025_11_25, pocket, r2026_07_28)
}


class Offer:
    """The revisions that one server offers."""

    def __init__(self, names: Iterable[str] | None = None) -> None:
        requested_names = list(REVISIONS) if names is None else texts("revisions", names)
        for name in requested_names:
            if name not in REVISIONS:
                raise ValueError(f"unknown revision {name!r}; known are {', '.join(REVISIONS)}")
        chosen = [revision for name, revision in REVISIONS.items() if name in requested_names]
        offered = [each for each in chosen if each.offered]
        if not offered:
            raise ValueError("name at least one dated revision")
        self.handshake = {each.name: each for each in chosen if not each.stateless}
        self.stateless = {each.name: each for each in chosen if each.stateless}
        self.supported = [each.name for each in reversed(offered)]
        self.supported_stateless = [name for name in self.supported if name in self.stateless]
        self.newest = offered[-1]  # for replies to a peer whose revision is not clear yet
        self.newest_handshake = next((each for each in reversed(offered) if not each.stateless), None)
        self.http_default = next((each for each in chosen if each.http_default), self.newest_handshake)
        self.methods = frozenset(method for each in chosen for method in each.requests)
