"""Waiting awake for the next line: only where it pays, and not for long."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from handrail.transports.lingering import Lingering

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes cannot be watched here")

PROMPT, LATE = 100_000, 1_000_000  # nanoseconds after an answer


class Client:
    """A pipe to the server, and a clock that goes on by a microsecond each time somebody looks at it."""

    def __init__(self) -> None:
        self.source, self._sink = os.pipe()
        self.now = 1
        self.looks = 0
        self.waits = Lingering(self.source, self.clock)

    def clock(self) -> int:
        self.looks += 1
        self.now += 1000
        return self.now

    def lingered(self) -> bool:
        """Whether the server waits awake now."""
        before = self.looks
        self.waits.wait()
        return self.looks - before > 1

    def asks(self, after: int) -> None:
        self.now += after
        self.waits.line_came()

    def writes(self) -> None:
        os.write(self._sink, b"x")

    def reads(self) -> None:
        os.read(self.source, 1)

    def close(self) -> None:
        os.close(self.source)
        os.close(self._sink)


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client()
    yield made
    made.close()


def test_nobody_waits_awake_for_a_client_that_asks_now_and_then(client: Client) -> None:
    for _ in range(100):
        client.asks(LATE)
        assert not client.lingered()


def test_a_client_that_asks_at_once_is_waited_for_and_one_pause_ends_it(client: Client) -> None:
    assert not client.lingered()  # nothing is known of it
    client.asks(PROMPT)
    for _ in range(5):
        client.writes()
        before = client.looks
        client.waits.wait()
        assert client.looks == before + 1, "what is there is seen without another look at the clock"
        client.reads()
        client.asks(0)
    client.asks(LATE)  # without an answer in between: says nothing
    assert client.lingered()
    client.asks(LATE)
    assert not client.lingered()


def test_a_moment_is_waited_and_no_longer(client: Client) -> None:
    client.waits.wait()
    client.asks(PROMPT)
    began = client.now
    assert client.lingered()
    assert 80_000 <= client.now - began < 85_000


def test_a_client_that_is_never_quick_enough_is_waited_for_once_in_a_thousand_lines(client: Client) -> None:
    vain = 0
    for _ in range(20_000):
        vain += client.lingered()
        client.asks(PROMPT)
    assert 20 <= vain <= 30


def test_after_one_success_it_is_tried_again_at_once(client: Client) -> None:
    for _ in range(2000):
        client.lingered()
        client.asks(PROMPT)
    while not client.lingered():
        client.asks(PROMPT)
    client.writes()
    for _ in range(1024):  # it is tried again
        client.asks(PROMPT)
        client.waits.wait()
    client.reads()
    client.asks(PROMPT)
    tried = []
    for _ in range(6):
        tried.append(client.lingered())
        client.asks(PROMPT)
    assert tried == [True, True, False, False, True, False]


def test_an_end_of_input_is_not_waited_for(client: Client) -> None:
    client.waits.wait()
    client.asks(PROMPT)
    os.close(client._sink)
    client._sink = os.open(os.devnull, os.O_RDONLY)
    assert not client.lingered()
