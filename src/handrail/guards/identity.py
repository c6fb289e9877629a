"""Who is calling: the protocol of verifiers, with API keys as the one that needs no other service.

Keys are kept as SHA-256, not as a slow password hash, which would only make refusing strangers expensive: a key is
random. That is why keys a person thought up are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from hashlib import sha256
from hmac import compare_digest
from secrets import token_urlsafe
from typing import Protocol

from handrail.model import Object, Principal
from handrail.suggest import mapping, texts

MIN_KEY_CHARS, MIN_DIFFERENT_CHARS, MAX_KEY_CHARS = 16, 8, 1024
WEAK_WORDS = (
    "changeme change-me change_me password passw0rd secret default letmein example sample qwerty 123456 abcdef "
    "apikey api-key api_key placeholder"
).split()
"""Words of keys that were never random. None is so short that a random key would have it by chance."""
WEAK_DIGESTS = frozenset(sha256(word.encode()).digest() for word in ["", "test", "admin", "token", *WEAK_WORDS])
KEY_HASH = re.compile(r"sha256:([0-9a-f]{64})")
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
"""No `#`, which the ids of token holders have (`issuer#subject`): a key's name is never one of those."""
RESERVED_NAMES = ("anonymous", "local")  # principals already: the caller without a token, and the user of this machine


_CREATE_HINT = "`handrail keys new {}` makes one, or ApiKeys.new() in Python"


class Verifier(Protocol):
    """Who is calling, from the token of a request."""

    metadata: Object | None
    """What the protected-resource metadata document (RFC 9728) says beside `resource`; None: there is none."""

    async def verify(self, token: str) -> Principal | None:
        """Return the principal of a token; None if it is not valid. The reason is never reported."""

    async def close(self) -> None:
        """End what is under way; no token is verified afterwards."""


class ApiKeys:
    """API keys, one for each principal.

    >>> key, hashed = ApiKeys.new()
    >>> verifier = ApiKeys({"alice": hashed}, scopes={"alice": {"orders:write"}})

    Give `key` to alice; keep `hashed`, which is no use to a thief.
    """

    metadata: Object | None = None

    def __init__(self, keys: Mapping[str, str], *, scopes: Mapping[str, Collection[str]] | None = None) -> None:
        keys = mapping("ApiKeys: keys", keys, "hashed keys by name")
        scopes = mapping("ApiKeys: scopes", scopes or {}, "scopes by name")
        if unmatched_names := scopes.keys() - keys.keys():
            name = min(unmatched_names)
            raise ValueError(f"scopes.{_quoted_name(name)}: there is no key of that name; {_CREATE_HINT.format(name)}")
        self._principals: dict[bytes, Principal] = {}
        for name, hashed in keys.items():
            if not KEY_NAME.fullmatch(name) or name in RESERVED_NAMES:
                hint = "letters, digits and ._@- make one, and it is not " + " or ".join(RESERVED_NAMES)
                raise ValueError(f"keys.{_quoted_name(name)}: not a name for a key; {hint} (`handrail keys new NAME`)")
            if not (match := KEY_HASH.fullmatch(hashed)):  # and the value is not repeated: it may be a key in the clear
                text = "not a hashed key, which is 'sha256:' and 64 hex digits"
                raise ValueError(f"keys.{name}: {text}; {_CREATE_HINT.format(name)}")
            if (digest := bytes.fromhex(match[1])) in WEAK_DIGESTS:
                raise ValueError(f"keys.{name}: a weak or default key; {_CREATE_HINT.format(name)}")
            if digest in self._principals:
                raise ValueError(
                    f"keys.{name}: {self._principals[digest].id} has the same key; {_CREATE_HINT.format(name)}"
                )
            self._principals[digest] = Principal(name, frozenset(texts(f"scopes.{name}", scopes.get(name, ()))))

    @classmethod
    def from_environment(cls, variable: str = "HANDRAIL_API_KEYS") -> ApiKeys:
        """Keys from an environment variable: `name=hash scope scope…`, with a semicolon or new line between two.

        For example `alice=sha256:9f86… orders:read orders:write; bob=sha256:6030…`. Without a key it is an error.
        """
        keys: dict[str, str] = {}
        scopes: dict[str, list[str]] = {}
        for entry in re.split(r"[;\n]", os.environ.get(variable, "")):
            if words := entry.split():
                name, _, hashed = words[0].partition("=")
                if not KEY_HASH.fullmatch(hashed) or name in keys:  # nor is the name repeated: it may be a key, too
                    raise ValueError(f"{variable}: entry {len(keys) + 1} is not name=sha256:…, or its name is taken")
                keys[name], scopes[name] = hashed, words[1:]
        if not keys:
            raise ValueError(f"{variable}: no API keys there; name=sha256:… is one")
        return cls(keys, scopes=scopes)

    @staticmethod
    def new() -> tuple[str, str]:
        """A new key, and what to keep of it."""
        key = f"hk_{token_urlsafe(32)}"
        return key, _hash(key)

    @staticmethod
    def hashed(key: str) -> str:
        """What to keep of `key`, which must be random and have 16 to 1024 characters."""
        is_too_simple = not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS or len(set(key)) < MIN_DIFFERENT_CHARS
        if is_too_simple or any(word in key.lower() for word in WEAK_WORDS):
            raise ValueError("a weak or default key; `handrail keys new NAME`, or ApiKeys.new(), makes a good one")
        return _hash(key)

    async def verify(self, token: str) -> Principal | None:
        if len(token) > MAX_KEY_CHARS:
            return None
        digest = sha256(token.encode("utf-8", "surrogatepass")).digest()
        principal_match = None
        for key_digest, principal in self._principals.items():
            # To the end, whichever it is: the time shows neither whether nor where a key matched.
            if compare_digest(key_digest, digest):
                principal_match = principal
        return principal_match

    async def close(self) -> None:
        """Nothing to end: keys hold no connection."""


def _quoted_name(name: str) -> str:
    return name if KEY_NAME.fullmatch(name) else repr(name)


def _hash(key: str) -> str:
    return f"sha256:{sha256(key.encode()).hexdigest()}"
