"""A webhook that answers what a person would be asked: signed both ways, and never waited for by what asks.

Each new question is posted as JSON with two headers: `Handrail-Timestamp`, in seconds since 1970, and
`Handrail-Signature`, `v1=` and the HMAC-SHA256 in hex of the timestamp, a full stop and the body. The receiver answers
200 with `{"id": …, "digest": …, "decision": "approve" or "deny"}`, the first two as they came, a `note` and `edited`
arguments if it likes, under the same headers for its own time and body; or 202, to leave it to others. What is
not rightly signed, not fresh, or not about this very question changes nothing: the question stays open.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct
from msgspec.json import decode, encode

from handrail.approvals.request import Approval
from handrail.errors import HandrailError, missing_extra
from handrail.guards.identity import ApiKeys
from handrail.model import Object
from handrail.protocol.http_rules import HttpPost, is_secure_url
from handrail.text.controls import one_line

if TYPE_CHECKING:
    from handrail.approvals.queue import ApprovalQueue

__all__ = ["Webhook", "WebhookSender", "signature"]

log = logging.getLogger("handrail")

TIMESTAMP, SIGNATURE = "Handrail-Timestamp", "Handrail-Signature"
MAX_CLOCK_SKEW_SECONDS = 300  # seconds the two clocks may differ by
MAX_PENDING_REQUESTS = 100


class Webhook(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The webhook that new approval requests are posted to. Its receiver may decide them."""

    url: Annotated[str, Meta(description="An https address, or http on this machine; empty: none.")] = ""
    secret_variable: Annotated[
        str, Meta(description="The environment variable with the secret that both sides sign with.")
    ] = ""
    seconds: Annotated[float, Meta(description="How long an answer is waited for, in seconds.")] = 60.0

    def __post_init__(self) -> None:
        if not self.url:
            return
        if not is_secure_url(self.url):
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
        value = os.environ.get(self.secret_variable, "")
        try:
            ApiKeys.hashed(value)
        except ValueError:
            hint = f"{self.secret_variable} is {'weak' if value else 'not set'}; use 16 or more random characters"
            raise ValueError(f"approvals.webhook.secret_variable: {hint}") from None
        return value


class WebhookReply(Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver's reply. Unknown members are refused: a misspelled one must not count as absent."""

    id: str
    digest: str
    decision: Literal["approve", "deny"]
    note: str = ""
    edited: Object | None = None


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """What either side puts into `Handrail-Signature`."""
    return f"v1={hmac.new(secret.encode(), timestamp.encode() + b'.' + body, 'sha256').hexdigest()}"


class WebhookSender:
    """Puts questions to the webhook, each in a task of its own, and sees to it that right answers are decisions."""

    def __init__(self, webhook: Webhook, queue: ApprovalQueue, post: HttpPost) -> None:
        self._webhook = webhook
        self._secret = webhook.secret()
        self._queue = queue
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, approval: Approval) -> None:
        """Start to send the request. This neither waits nor fails."""
        if len(self._tasks) >= MAX_PENDING_REQUESTS:
            self._warn(approval, f"was not asked: {MAX_PENDING_REQUESTS} questions are there already")
            return
        task = asyncio.create_task(self._deliver(approval))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, approval: Approval) -> None:
        try:
            reply = await self._request_decision(approval)
            if reply is not None:
                is_approved, by = reply.decision == "approve", f"webhook {self._webhook.host}"
                await self._queue.decide(approval.id, is_approved, by=by, note=reply.note, edited=reply.edited)
        except (HandrailError, ValueError, RecursionError) as problem:
            self._warn(approval, f"has not decided: {problem}")

    async def _request_decision(self, approval: Approval) -> WebhookReply | None:
        """Return the verified reply; None if the decision is made elsewhere."""
        request, timestamp = approval.asked, str(int(self._queue.now()))
        payload = {
            "id": approval.id,
            "digest": approval.digest,
            "server": request.server,
            "tool": request.tool,
            "principal": request.principal,
            "arguments": request.arguments,
            "rule": request.rule,
            "expires": approval.expires,
        }
        body = encode(payload)
        headers = {"Content-Type": "application/json", TIMESTAMP: timestamp}
        headers[SIGNATURE] = signature(self._secret, timestamp, body)
        post_task = asyncio.ensure_future(self._post(self._webhook.url, body, headers))
        seconds = min(self._webhook.seconds, approval.expires - approval.created)
        wait_task = asyncio.ensure_future(self._queue.wait(approval, seconds))
        try:
            await asyncio.wait((post_task, wait_task), return_when=asyncio.FIRST_COMPLETED)
            if not post_task.done():
                if wait_task.result().state == "pending":
                    raise ValueError("no answer in time")
                return None
            status, response_headers, response_body = post_task.result()
        finally:
            for each in (post_task, wait_task):
                each.cancel()
            await asyncio.gather(post_task, wait_task, return_exceptions=True)
        if status == 202:
            return None
        if status != 200:
            raise ValueError(f"status {status}")
        return self._verify_reply(approval, response_headers, response_body)

    def _verify_reply(self, approval: Approval, headers: Mapping[str, str], body: bytes) -> WebhookReply:
        timestamp, received_signature = (headers.get(name.lower(), "") for name in (TIMESTAMP, SIGNATURE))
        if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
            raise ValueError("no timestamp in seconds")
        if not hmac.compare_digest(
            signature(self._secret, timestamp, body).encode(), received_signature.encode(errors="replace")
        ):
            raise ValueError("not signed, or not with this secret")
        if abs(int(timestamp) - self._queue.now()) > MAX_CLOCK_SKEW_SECONDS:
            raise ValueError("not fresh")
        reply = decode(body, type=WebhookReply)
        if (reply.id, reply.digest) != (approval.id, approval.digest):
            raise ValueError("an answer to another question")
        return reply

    def _warn(self, approval: Approval, message: str) -> None:
        log.warning("approval %s: webhook %s %s", approval.id, self._webhook.host, one_line(message, 200))
