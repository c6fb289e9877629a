"""What all tests of stores share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from patience import PATIENCE

DEADLINE = 5 * int(PATIENCE)


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A store that never answers fails its test; it does not stop the run."""

    def too_late(*_: object) -> None:
        raise TimeoutError(f"no end after {DEADLINE} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(DEADLINE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
