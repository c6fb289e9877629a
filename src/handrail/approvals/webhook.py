"""A webhook that answers what a person would be asked: signed both ways, and never waited for by what asks.

Each new question is posted as JSON with two headers: `Handrail-Timestamp`, in seconds since 1970, and
`Handrail-Signature`, `v1=` and the HMAC-SHA256 in hex of the timestamp, a full stop and the body. The receiver answers
200 with `{"id": …, "digest": …, "decision": "approve" or "deny"}`, the first two as they came, a `note` and `edited`
arguments if it likes, under the same headers for its own time and body; or 202, if somebody else is to decide. What is
not rightly signed, not fresh, or not about this very question changes nothing: the question stays open.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct
from msgspec.json import decode, encode

from handrail.errors import HandrailError, missing_extra
from handrail.guards.identity import ApiKeys
from handrail.model import Object
from handrail.protocol.http_rules import is_sheltered
from handrail.text.controls import one_line

if TYPE_CHECKING:
    from handrail.approvals.queue import Approval, Desk

__all__ = ["Post", "Sender", "Webhook", "signature"]

log = logging.getLogger("handrail")

TIMESTAMP, SIGNATURE = "Handrail-Timestamp", "Handrail-Signature"
FRESH = 300  # seconds the two clocks may differ by
MAX_AT_ONCE = 100

Post = Callable[[str, bytes, Mapping[str, str]], Awaitable[tuple[int, Mapping[str, str], bytes]]]
"""Posts a body with headers to an address: the status, the headers by their names in lower case, and the body."""


class Webhook(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where new questions are posted to; whoever is there may decide them."""

    url: Annotated[str, Meta(description="An https address, or http on this machine; empty: none.")] = ""
    secret_variable: Annotated[
        str, Meta(description="The environment variable with the secret that both sides sign with.")
    ] = ""
    seconds: Annotated[float, Meta(description="How long an answer is waited for, in seconds.")] = 60.0

    def __post_init__(self) -> None:
        if not self.url:
            return
        if not is_sheltered(self.url):
            # The address is not repeated: it may have a token in it.
            raise ValueError("approvals.webhook.url: https is needed, or http to this machine, and no password in it")
        if not self.secret_variable:
            raise ValueError("approvals.webhook.secret_variable: name the environment variable that has the secret")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"approvals.webhook.seconds: {self.seconds!r} is not a number of seconds above 0")
        if find_spec("aiohttp") is None:
            raise missing_extra("http", "approvals.webhook needs aiohttp")

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def secret(self) -> str:
        """What is signed with; ValueError if it is missing or could be guessed."""
        found = os.environ.get(self.secret_variable, "")
        try:
            ApiKeys.hashed(found)
        except ValueError:
            what = f"{self.secret_variable} is {'weak' if found else 'not set'}; use 16 or more random characters"
            raise ValueError(f"approvals.webhook.secret_variable: {what}") from None
        return found


class Answer(Struct, frozen=True, forbid_unknown_fields=True):
    """What the receiver says. A member that is misspelled must not be one that is not there."""

    id: str
    digest: str
    decision: Literal["approve", "deny"]
    note: str = ""
    edited: Object | None = None


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """What either side puts into `Handrail-Signature`."""
    return f"v1={hmac.new(secret.encode(), timestamp.encode() + b'.' + body, 'sha256').hexdigest()}"


class Sender:
    """Puts questions to the webhook, each in a task of its own, and sees to it that right answers are decisions."""

    def __init__(self, webhook: Webhook, desk: Desk, post: Post) -> None:
        self._webhook = webhook
        self._secret = webhook.secret()
        self._desk = desk
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, approval: Approval) -> None:
        """Begin to; does not wait, and does not fail."""
        if len(self._tasks) >= MAX_AT_ONCE:
            self._tell(approval, f"was not asked: {MAX_AT_ONCE} questions are there already")
            return
        task = asyncio.create_task(self._settle(approval))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self, approval: Approval) -> None:
        try:
            said = await self._answer(approval)
            if said is not None:
                yes, by = said.decision == "approve", f"webhook {self._webhook.host}"
                await self._desk.decide(approval.id, yes, by=by, note=said.note, edited=said.edited)
        except (HandrailError, ValueError, RecursionError) as problem:
            self._tell(approval, f"has not decided: {problem}")

    async def _answer(self, approval: Approval) -> Answer | None:
        """What was answered; None: somebody else decides, or has decided meanwhile."""
        asked, stamp = approval.asked, str(int(self._desk.now()))
        question = {
            "id": approval.id,
            "digest": approval.digest,
            "server": asked.server,
            "tool": asked.tool,
            "principal": asked.principal,
            "arguments": asked.arguments,
            "rule": asked.rule,
            "expires": approval.expires,
        }
        body = encode(question)
        headers = {"Content-Type": "application/json", TIMESTAMP: stamp}
        headers[SIGNATURE] = signature(self._secret, stamp, body)
        posting = asyncio.ensure_future(self._post(self._webhook.url, body, headers))
        seconds = min(self._webhook.seconds, approval.expires - approval.created)
        deciding = asyncio.ensure_future(self._desk.wait(approval, seconds))
        try:
            await asyncio.wait((posting, deciding), return_when=asyncio.FIRST_COMPLETED)
            if not posting.done():
                if deciding.result().state == "pending":
                    raise ValueError("no answer in time")
                return None
            status, told, answer = posting.result()
        finally:
            for each in (posting, deciding):
                each.cancel()
            await asyncio.gather(posting, deciding, return_exceptions=True)
        if status == 202:
            return None
        if status != 200:
            raise ValueError(f"status {status}")
        return self._checked(approval, told, answer)

    def _checked(self, approval: Approval, told: Mapping[str, str], answer: bytes) -> Answer:
        stamp, signed = (told.get(name.lower(), "") for name in (TIMESTAMP, SIGNATURE))
        if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 12):
            raise ValueError("no timestamp in seconds")
        if not hmac.compare_digest(signature(self._secret, stamp, answer).encode(), signed.encode(errors="replace")):
            raise ValueError("not signed, or not with this secret")
        if abs(int(stamp) - self._desk.now()) > FRESH:
            raise ValueError("not fresh")
        said = decode(answer, type=Answer)
        if (said.id, said.digest) != (approval.id, approval.digest):
            raise ValueError("an answer to another question")
        return said

    def _tell(self, approval: Approval, what: str) -> None:
        log.warning("approval %s: webhook %s %s", approval.id, self._webhook.host, one_line(what, 200))
