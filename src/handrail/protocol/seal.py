"""Sealed strings: cursors, request state, session ids. A peer cannot read, change, extend or pass them on (P-25)."""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from msgspec.json import decode, encode

from handrail.model import Json

MIN_KEY_BYTES = 32
MIN_DISTINCT_BYTES, MIN_TRIPLES = 8, 26  # characters, and runs of three; a random key of 32 bytes has more of both
MAX_EQUAL_STEP_SHARE = 0.4  # of the steps from one byte to the next; in a random key less than a quarter are the same
KEY_HINT = "`handrail keys seal` prints a good one"
_HEX, _BASE64 = re.compile(rb"[0-9a-fA-F]+"), re.compile(rb"[A-Za-z0-9+/_-]+={0,2}")
_WEAK_WORDS = re.compile(rb"(?i)change.?me|passw[o0]rd|secret|default|example|qwerty|placeholder")
_MAC_BYTES = 16
_PADDING_BYTES = 32  # a sealed text is a multiple of it: its length tells nothing of a number in it


class Seal:
    """Seals with the first key, opens with any of them, so that keys can be rotated.

    A sealed text is good for one purpose, one holder and until its expiry; a foreign, changed or expired one
    cannot be told from one that never existed.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if not isinstance(key, bytes):
                raise TypeError(f"keys: expected bytes, got {type(key).__name__}; {KEY_HINT}")
            if problem := key_problem(key):
                raise ValueError(f"keys: {problem}; {KEY_HINT}")
        self._keys = [hashlib.blake2b(key, person=b"handrail seal").digest() for key in keys]

    @property
    def fingerprints(self) -> list[str]:
        """The keys in their order, each as a digest that tells nothing else of it."""
        return [hashlib.blake2b(key, digest_size=12, person=b"handrail note").hexdigest() for key in self._keys]

    def seal(self, purpose: str, holder: str, payload: Json, expires: int) -> str:
        body = encode([expires, payload])
        body = body.ljust(-(-len(body) // _PADDING_BYTES) * _PADDING_BYTES)
        mac = _mac(self._keys[0], purpose, holder, body)
        return _text(mac + _xor_keystream(self._keys[0], mac, body))

    def open(self, purpose: str, holder: str, text: str, now: float) -> Json | None:
        """The payload, or None if the text is not ours, not this holder's, or too old."""
        content = self.read(purpose, holder, text)
        return content[1] if content is not None and now < content[0] else None

    def read(self, purpose: str, holder: str, text: str) -> tuple[int, Json] | None:
        """Expiry and payload, whether or not it has expired."""
        try:
            raw = urlsafe_b64decode(text + "==")
        except ValueError:
            return None
        mac, encrypted = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        # Base64 has spare bits: two texts can stand for the same bytes. Only the one we wrote counts.
        if _text(raw) != text:
            return None
        for key in self._keys:
            body = _xor_keystream(key, mac, encrypted)
            if hmac.compare_digest(mac, _mac(key, purpose, holder, body)):
                expires, payload = decode(body)
                return expires, payload
        return None


def key_problem(key: bytes) -> str:
    """What makes a key too weak to seal with; empty if nothing does. The key is not repeated.

    A text counts as the bytes that it stands for in hex or Base64. What a person made up is not always recognized.
    """
    written = key.strip()
    if _HEX.fullmatch(written):
        material = len(written) // 2
    elif _BASE64.fullmatch(written):
        material = len(written.rstrip(b"=")) * 3 // 4
    else:
        material = len(key)
    if material < MIN_KEY_BYTES:
        return f"{material} bytes are too few for a key, {MIN_KEY_BYTES} are needed"
    steps = Counter((after - before) % 256 for before, after in pairwise(key))
    is_sequence = steps.most_common(1)[0][1] > MAX_EQUAL_STEP_SHARE * len(key)
    triples = {key[at : at + 3] for at in range(len(key) - 2)}
    if is_sequence or len({*key}) < MIN_DISTINCT_BYTES or len(triples) < MIN_TRIPLES or _WEAK_WORDS.search(key):
        return "a word, a default, a sequence or a repetition is no key; it has to be random"
    return ""


def _text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).rstrip(b"=").decode()


def _mac(key: bytes, purpose: str, holder: str, body: bytes) -> bytes:
    head = f"{len(purpose)}:{purpose}{len(holder)}:{holder}".encode()
    return hashlib.blake2b(head + body, key=key, digest_size=_MAC_BYTES).digest()


def _xor_keystream(key: bytes, mac: bytes, body: bytes) -> bytes:
    """The body under a stream that no other body has: its own code is what it begins with, as in RFC 5297."""
    stream = hashlib.shake_256(b"handrail veil" + key + mac).digest(len(body))
    return (int.from_bytes(body) ^ int.from_bytes(stream)).to_bytes(len(body))
