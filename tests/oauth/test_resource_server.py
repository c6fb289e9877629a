"""Tokens: the matrix of bad ones, the issuer's keys in good and bad days, and asking about tokens."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import sys
from base64 import b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any
from urllib.parse import parse_qs, unquote_plus

import pytest
from joserfc.errors import SecurityWarning
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from handrail.guards.identity import Verifier
from handrail.model import Object, Principal
from handrail.oauth import resource_server as verify_module
from handrail.oauth.resource_server import Introspection, JwtVerifier
from patience import PATIENCE
from requirements import requirement

ISSUER = "https://id.example"
AUDIENCE = "https://api.example/mcp"
NOW = 1_800_000_000.0
ALICE = Principal(f"{ISSUER}#alice", frozenset({"orders:read"}))
CLAIMS: Object = {
    "iss": ISSUER,
    "sub": "alice",
    "aud": AUDIENCE,
    "exp": NOW + 600,
    "iat": NOW - 5,
    "nbf": NOW - 5,
    "scope": "orders:read",
}


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class Issuer:
    """A little HTTP server on loopback: `answer` is what it says, `asked` what it was told."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.answer: bytes | Callable[[str], bytes] | None = b""
        self.status = "200 OK"
        self.headers = ""
        self.arrived = asyncio.Event()
        self.released = asyncio.Event()
        self.released.set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/keys"

    def publish(self, *keys: Object) -> None:
        self.answer = json.dumps({"keys": keys}).encode()

    def say(self, **answer: Any) -> None:
        self.answer = json.dumps(answer).encode()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = next((int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-l")), 0)
            body = (await reader.readexactly(length)).decode()
            self.asked.append((head, body))
            self.arrived.set()
            await self.released.wait()
            if self.answer is None:
                return
            answer = self.answer(body) if callable(self.answer) else self.answer
            writer.write(f"HTTP/1.1 {self.status}\r\n{self.headers}Connection: close\r\n\r\n".encode() + answer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    it = Issuer()
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    it.port = server.sockets[0].getsockname()[1]
    yield it
    it.released.set()
    server.close()
    await server.wait_closed()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def verifier(issuer: Issuer, clock: Clock) -> AsyncIterator[JwtVerifier]:
    """Of an issuer with the keys `rsa`, `ec` and `ed`."""
    issuer.publish(*PUBLIC)
    it = JwtVerifier(issuer=ISSUER, audience=AUDIENCE, jwks_url=issuer.url, deadline=5, clock=clock)
    yield it
    await it.close()


@cache
def key(name: str) -> Key:
    """A key pair by name, made once: `rsa…`, `ec…` or `ed…`."""
    if name == "rsa-weak":
        with pytest.warns(SecurityWarning):
            return RSAKey.generate_key(1024, {"kid": name})
    if name.startswith("rsa"):
        return RSAKey.generate_key(2048, {"kid": name})
    if name.startswith("ec"):
        return ECKey.generate_key("P-256", {"kid": name})
    return OKPKey.generate_key("Ed25519", {"kid": name})


def public(name: str, **more: Any) -> Object:
    return {**key(name).as_dict(private=False), **more}


PUBLIC = [public("rsa"), public("ec"), public("ed")]


def b64(data: bytes | Object) -> str:
    return urlsafe_b64encode(data if isinstance(data, bytes) else json.dumps(data).encode()).rstrip(b"=").decode()


def token(
    with_key: str | Key = "ec", header: Object | None = None, payload: bytes | None = None, **changes: Any
) -> str:
    """A token signed with a key. A change to None leaves the member out, in the header as well."""
    signer = key(with_key) if isinstance(with_key, str) else with_key
    alg = {"RSA": "RS256", "EC": "ES256", "OKP": "Ed25519", "oct": "HS256"}[signer.key_type]
    full: Object = {"alg": alg, "typ": "at+jwt", "kid": signer.kid} | (header or {})
    full = {name: value for name, value in full.items() if value is not None}
    said = {name: value for name, value in (CLAIMS | changes).items() if value is not None}
    signed = f"{b64(full)}.{b64(said if payload is None else payload)}"
    model = JWSRegistry.algorithms.get(full.get("alg", ""))
    if model is None or model.key_type != signer.key_type:
        model = JWSRegistry.algorithms[alg]
    return f"{signed}.{b64(model.sign(signed.encode(), signer))}"


def hmac_with_public_key(of: str, as_: str, alg: str = "HS256") -> str:
    """The classic: the server's own public key, which everybody has, taken for a shared secret."""
    it = key(of)
    assert isinstance(it, RSAKey | ECKey)
    secret = it.as_pem(private=False) if as_ == "pem" else json.dumps(public(of)).encode()
    signed = f"{b64({'alg': alg, 'typ': 'JWT', 'kid': of})}.{b64(CLAIMS)}"
    return f"{signed}.{b64(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


def unsigned(alg: str = "none", mark: str = "") -> str:
    return f"{b64({'alg': alg, 'typ': 'JWT', 'kid': 'ec'})}.{b64(CLAIMS)}.{mark}"


def altered() -> str:
    """A good signature under other claims."""
    head, _, mark = token().split(".")
    return f"{head}.{b64({**CLAIMS, 'sub': 'admin'})}.{mark}"


BAD: dict[str, Callable[[], str]] = {
    "no token": lambda: "",
    "a space": lambda: " ",
    "a scheme before it": lambda: f"Bearer {token()}",
    "garbage": lambda: "garbage",
    "dots": lambda: "..",
    "garbage in three parts": lambda: "a.b.c",
    "not ASCII": lambda: token() + "é",
    "half a surrogate": lambda: token() + "\udc80",
    "a line more": lambda: token() + "\n",
    "a part more": lambda: token() + ".e30",
    "padded": lambda: token() + "=",
    "long": lambda: token(jti="x" * 20_000),
    "very deep header": lambda: f"{b64(b'[' * 3000)}.{b64(CLAIMS)}.AAAA",
    "very deep unknown claim": lambda: token(payload=b'{"x":' + b"[" * 5000),
    "header that is no object": lambda: f"{b64(b'[1]')}.{b64(CLAIMS)}.AAAA",
    "payload that is no object": lambda: token(payload=b'["alice"]'),
    "payload that is no JSON": lambda: token(payload=b"alice"),
    "alg none": unsigned,
    "alg None": lambda: unsigned("None", "AAAA"),
    "alg none with something for a signature": lambda: unsigned("none", "AAAA"),
    "alg ES256 without a signature": lambda: unsigned("ES256"),
    "no alg": lambda: token(header={"alg": None}),
    "alg a number": lambda: token(header={"alg": 256}),
    "HMAC with the public RSA key as PEM": lambda: hmac_with_public_key("rsa", "pem"),
    "HMAC with the public RSA key as JSON": lambda: hmac_with_public_key("rsa", "json"),
    "HMAC with the public EC key": lambda: hmac_with_public_key("ec", "pem"),
    "HMAC called RS256": lambda: hmac_with_public_key("rsa", "pem", "RS256"),
    "RSA key called ES256": lambda: token("rsa", {"alg": "ES256"}),
    "EC key called RS256": lambda: token("ec", {"alg": "RS256"}),
    "EC key for another curve": lambda: token("ec", {"alg": "ES384"}),
    "an algorithm that is not on the list": lambda: token("rsa", {"alg": "RS512"}),
    "signed by a stranger under our kid": lambda: token("ec-stranger", {"kid": "ec"}),
    "key brought along": lambda: token("ec-stranger", {"jwk": public("ec-stranger"), "kid": "ec"}),
    "key brought along, no kid": lambda: token("ec-stranger", {"jwk": public("ec-stranger"), "kid": None}),
    "key to be fetched": lambda: token("ec-stranger", {"jku": "https://evil.example/keys"}),
    "unknown kid": lambda: token("ec-stranger"),
    "kid a path": lambda: token("ec", {"kid": "../../dev/null"}),
    "kid a list": lambda: token("ec", {"kid": ["ec"]}),
    "kid empty": lambda: token("ec", {"kid": ""}),
    "kid of another key": lambda: token("ec", {"kid": "rsa"}),
    "crit": lambda: token(header={"crit": ["exp"]}),
    "payload not encoded": lambda: token(header={"crit": ["b64"], "b64": False}),
    "a logout token": lambda: token(header={"typ": "logout+jwt"}),
    "a DPoP proof": lambda: token(header={"typ": "dpop+jwt"}),
    "claims altered": altered,
    "signature cut": lambda: token()[:-4],
    "signature of another token": lambda: f"{token().rpartition('.')[0]}.{token(sub='bob').rpartition('.')[2]}",
    "another audience": lambda: token(aud="https://other.example"),
    "other audiences": lambda: token(aud=["https://other.example", AUDIENCE + "/"]),
    "audience that begins with ours": lambda: token(aud=AUDIENCE + ".evil.example"),
    "audience in another case": lambda: token(aud=AUDIENCE.upper()),
    "no audience": lambda: token(aud=None),
    "empty audience": lambda: token(aud=""),
    "empty audiences": lambda: token(aud=[]),
    "audience an object": lambda: token(aud={AUDIENCE: True}),
    "another issuer": lambda: token(iss="https://evil.example"),
    "issuer with a slash": lambda: token(iss=ISSUER + "/"),
    "no issuer": lambda: token(iss=None),
    "issuers": lambda: token(iss=[ISSUER]),
    "token of the test environment": lambda: token("ec-staging", iss="https://id.staging.example"),
    "token of the test environment under our names": lambda: token("ec-staging"),
    "expired": lambda: token(exp=NOW - 31),
    "expired long ago": lambda: token(exp=0),
    "no exp": lambda: token(exp=None),
    "exp a text": lambda: token(exp=str(NOW + 600)),
    "exp true": lambda: token(exp=True),
    "exp without end": lambda: token(payload=json.dumps(CLAIMS).encode()[:-1] + b', "exp": 1e999}'),
    "exp no number": lambda: token(payload=json.dumps({**CLAIMS, "exp": float("nan")}).encode()),
    "nbf in the future": lambda: token(nbf=NOW + 31),
    "nbf a text": lambda: token(nbf="now"),
    "iat in the future": lambda: token(iat=NOW + 31),
    "no sub": lambda: token(sub=None),
    "empty sub": lambda: token(sub=""),
    "sub a number": lambda: token(sub=7),
    "sub with a new line": lambda: token(sub="alice\nadmin"),
    "scope a number": lambda: token(scope=7),
}


@requirement("P-24", "SRV-608")
@pytest.mark.parametrize("name", BAD)
async def test_p24_a_bad_token_is_nobody(verifier: JwtVerifier, name: str) -> None:
    assert await verifier.verify(BAD[name]()) is None
    assert await verifier.verify(token()) == ALICE  # a bad one leaves nothing behind


@pytest.mark.parametrize(
    ("made", "scopes"),
    [
        (lambda: token("rsa"), {"orders:read"}),
        (lambda: token("rsa", {"alg": "PS256"}), {"orders:read"}),
        (lambda: token("ed"), {"orders:read"}),
        (lambda: token("ed", {"alg": "EdDSA"}), {"orders:read"}),
        (lambda: token("ed", {"kid": None}), {"orders:read"}),  # the only key that can be meant
        (lambda: token(header={"typ": None}), {"orders:read"}),
        (lambda: token(header={"typ": "JWT", "x": {"y": 1}}), {"orders:read"}),
        (lambda: token(aud=["https://other.example", AUDIENCE]), {"orders:read"}),
        (lambda: token(exp=NOW - 29, nbf=NOW + 29, iat=NOW + 29), {"orders:read"}),
        (lambda: token(nbf=None, iat=None, exp=NOW + 0.5), {"orders:read"}),
        (lambda: token(scope=None), set()),
        (lambda: token(scope="a  b"), {"a", "b"}),
        (lambda: token(scope=None, scp=["a", "b"]), {"a", "b"}),
        (lambda: token(scope=None, scp="a b"), {"a", "b"}),
    ],
)
async def test_a_good_token_is_its_subject(
    verifier: JwtVerifier, issuer: Issuer, made: Callable[[], str], scopes: set[str]
) -> None:
    good = made()
    for _ in range(2):
        assert await verifier.verify(good) == Principal(f"{ISSUER}#alice", frozenset(scopes))
    assert len(issuer.asked) == 1


@requirement("SRV-607")
async def test_metadata_names_the_issuer(verifier: JwtVerifier, issuer: Issuer) -> None:
    plain: Verifier = verifier
    assert plain.metadata == {"authorization_servers": [ISSUER], "bearer_methods_supported": ["header"]}
    scoped = JwtVerifier(issuer=ISSUER, audience=AUDIENCE, keys={"keys": PUBLIC}, required_scopes=["b", "a"])
    assert scoped.metadata is not None and scoped.metadata["scopes_supported"] == ["a", "b"]
    asking: Verifier = Introspection(issuer.url, "us", "s" * 16, audience=AUDIENCE)
    assert asking.metadata is None
    assert Introspection(issuer.url, "us", "s" * 16, audience=AUDIENCE, issuer=ISSUER).metadata == plain.metadata


async def test_required_scopes_are_required(clock: Clock) -> None:
    given: Object = {"issuer": ISSUER, "audience": ["https://old.example", AUDIENCE], "keys": {"keys": PUBLIC}}
    verifier = JwtVerifier(**given, required_scopes={"orders:read", "orders:write"}, clock=clock)
    assert await verifier.verify(token()) is None
    assert await verifier.verify(token(scope="orders:write", scp=["orders:read", "x"])) is not None


# ---------------------------------------------------------------- keys


@requirement("P-24")
@pytest.mark.parametrize("name", ["unknown kid", "token of the test environment under our names", "kid a path"])
async def test_a_hundred_unknown_keys_at_once_ask_the_issuer_once(
    verifier: JwtVerifier, issuer: Issuer, clock: Clock, name: str
) -> None:
    bad = [token(header={"kid": f"unknown{number}"}) for number in range(99)] + [BAD[name]()]
    assert await asyncio.gather(*map(verifier.verify, bad)) == [None] * 100
    assert len(issuer.asked) == 1
    clock.now += 29
    assert await asyncio.gather(*map(verifier.verify, bad)) == [None] * 100
    assert len(issuer.asked) == 1
    clock.now += 1  # the floor
    assert await asyncio.gather(*map(verifier.verify, bad)) == [None] * 100
    assert len(issuer.asked) == 2
    assert await verifier.verify(token()) == ALICE


@requirement("P-24")
async def test_a_token_that_no_key_could_save_asks_nobody(verifier: JwtVerifier, issuer: Issuer) -> None:
    for name in ("alg none", "no alg", "crit", "a logout token", "garbage", "long"):
        assert await verifier.verify(BAD[name]()) is None
    for alg in ("none", "HS256", "RS512"):
        assert await verifier.verify(unsigned(alg, "AAAA")) is None
    assert issuer.asked == []


@requirement("P-24")
async def test_who_goes_away_takes_nothing_from_the_others(verifier: JwtVerifier, issuer: Issuer) -> None:
    issuer.released.clear()
    impatient = asyncio.create_task(verifier.verify(token()))
    await issuer.arrived.wait()
    patient = asyncio.create_task(verifier.verify(token("rsa")))
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    issuer.released.set()
    assert await patient == ALICE
    assert len(issuer.asked) == 1


async def test_rotated_keys(verifier: JwtVerifier, issuer: Issuer, clock: Clock) -> None:
    old, new = token("ec"), token("ec-new")
    assert await verifier.verify(old) == ALICE
    issuer.publish(public("ec-new"))
    assert await verifier.verify(new) is None  # the floor: asked just now
    clock.now += 30
    assert await verifier.verify(new) == ALICE
    assert await verifier.verify(old) is None  # its key is gone, and what was remembered with it
    assert len(issuer.asked) == 2


@requirement("P-24")
async def test_a_withdrawn_key_is_noticed_without_a_new_one(
    verifier: JwtVerifier, issuer: Issuer, clock: Clock
) -> None:
    good = token(exp=NOW + 10_000)
    assert await verifier.verify(good) == ALICE
    issuer.publish()
    clock.now += 599
    assert await verifier.verify(good) == ALICE
    clock.now += 1
    assert await verifier.verify(good) is None


@requirement("P-24")
async def test_the_issuer_is_down(
    verifier: JwtVerifier, issuer: Issuer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert await verifier.verify(token()) == ALICE
    issuer.answer = None  # hangs up
    clock.now += 1000
    assert await verifier.verify(token(exp=NOW + 5000)) == ALICE  # the keys at hand stay in use
    assert await verifier.verify(token("ec-new", exp=NOW + 5000)) is None
    assert len(issuer.asked) <= 3  # aiohttp may try a second time
    assert "oauth: keys of https://id.example not fetched" in caplog.text
    issuer.publish(public("ec-new"))
    clock.now += 30
    assert await verifier.verify(token("ec-new", exp=NOW + 5000)) == ALICE


@requirement("P-24")
async def test_an_issuer_that_was_never_there(clock: Clock) -> None:
    verifier = JwtVerifier(issuer=ISSUER, audience=AUDIENCE, jwks_url="http://127.0.0.1:9/keys", clock=clock)
    assert await asyncio.gather(*(verifier.verify(token()) for _ in range(10))) == [None] * 10
    await verifier.close()


@requirement("P-24")
async def test_a_slow_issuer_is_not_waited_for(issuer: Issuer, clock: Clock) -> None:
    issuer.publish(*PUBLIC)
    issuer.released.clear()
    verifier = JwtVerifier(issuer=ISSUER, audience=AUDIENCE, jwks_url=issuer.url, deadline=0.05, clock=clock)
    async with asyncio.timeout(PATIENCE):
        assert await verifier.verify(token()) is None
    await verifier.close()


NEW_KEYS = json.dumps({"keys": [*PUBLIC, public("ec-new")]}).encode()


@requirement("P-24")
@pytest.mark.parametrize(
    ("status", "headers", "answer"),
    [
        ("200 OK", "", NEW_KEYS + b" " * 2_000_000),
        ("200 OK", "Content-Length: 2000000000\r\n", NEW_KEYS),
        ("200 OK", "", json.dumps({"keys": [public("ec")] * 100 + [public("ec-new")]}).encode()),
        ("200 OK", "", b'{"keys":[{"x":' + b"[" * 20_000),
        ("200 OK", "", b"[]"),
        ("200 OK", "", b'{"keys": {}}'),
        ("200 OK", "", b"<html>"),
        ("200 OK", "Content-Encoding: gzip\r\n", b"\x1f\x8b" + b"\0" * 100),
        ("404 Not Found", "", NEW_KEYS),
        ("500 Oh", "", NEW_KEYS),
        ("302 Found", "Location: {url}/elsewhere\r\n", NEW_KEYS),
        ("307 Found", "Location: http://169.254.169.254/\r\n", b""),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",  # keys are new in each run
)
async def test_a_bad_answer_is_none(
    verifier: JwtVerifier, issuer: Issuer, clock: Clock, status: str, headers: str, answer: bytes
) -> None:
    assert await verifier.verify(token()) == ALICE
    issuer.status, issuer.headers, issuer.answer = status, headers.format(url=issuer.url), answer
    clock.now += 30
    assert await verifier.verify(token("ec-new")) is None
    assert len(issuer.asked) == 2  # and it is not followed elsewhere
    assert await verifier.verify(token()) == ALICE


@requirement("P-24")
@pytest.mark.parametrize(
    ("signer", "jwk"),
    [
        ("ec", public("ec", use="enc")),
        ("ec", public("ec", alg="ES384")),
        ("ec", public("ec", key_ops=["sign"])),
        ("ec", public("ec", x="AAAA")),
        ("ec", public("ec", crv="P-999")),
        ("ec", public("ec", kty="RSA")),
        ("ec", key("ec").as_dict(private=True)),  # published: anybody can sign with it
        ("rsa", public("rsa", alg="PS256")),
        ("rsa-weak", public("rsa-weak")),
        ("rsa", public("rsa", n="AQAB")),
        ("rsa", public("rsa", n="AQAB" * 10_000)),
        ("ed", public("ed", crv="X25519")),
        ("ed", public("ed", kty=["OKP"])),
        ("oct", {"kty": "oct", "kid": "oct", "k": b64(b"k" * 32)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # keys are new in each run
)
async def test_a_key_is_for_what_it_says_and_a_bad_one_spoils_no_other(
    issuer: Issuer, clock: Clock, signer: str, jwk: Object
) -> None:
    issuer.publish(jwk, public("ec-new"))
    verifier = JwtVerifier(issuer=ISSUER, audience=AUDIENCE, jwks_url=issuer.url, clock=clock)
    with_key = OctKey.import_key(b"k" * 32, {"kid": "oct"}) if signer == "oct" else signer
    for alg in (None, "EdDSA") if signer == "ed" else (None,):
        assert await verifier.verify(token(with_key, {"alg": alg} if alg else None)) is None
    assert await verifier.verify(token("ec-new")) == ALICE
    await verifier.close()


async def test_no_choice_is_made_between_keys(clock: Clock) -> None:
    given: Object = {"issuer": ISSUER, "audience": AUDIENCE, "clock": clock}
    without_kid = token(header={"kid": None})
    one = JwtVerifier(**given, keys={"keys": [public("ec"), public("rsa")]})
    assert await one.verify(without_kid) == ALICE
    two = JwtVerifier(**given, keys={"keys": [public("ec"), public("ec-new")]})
    assert await two.verify(without_kid) is None
    same = JwtVerifier(**given, keys={"keys": [public("ec"), public("ec-new", kid="ec")]})
    assert await same.verify(token()) is None


async def test_nothing_of_the_environment_or_of_compression(
    verifier: JwtVerifier, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert await verifier.verify(token()) == ALICE
    [(head, body)] = issuer.asked
    assert head.startswith("GET /keys HTTP/1.1\r\n") and "Accept-Encoding: identity\r\n" in head and body == ""
    assert "authorization" not in head.lower() and "cookie" not in head.lower()


# ---------------------------------------------------------------- what is remembered, what is told


@requirement("P-24")
async def test_a_remembered_token_ends_with_its_exp(verifier: JwtVerifier, clock: Clock) -> None:
    short = token(exp=NOW + 60)
    assert await verifier.verify(short) == ALICE
    clock.now += 60 + 29
    assert await verifier.verify(short) == ALICE  # the leeway
    clock.now += 1
    assert await verifier.verify(short) is None


async def test_what_is_remembered_is_bounded_and_holds_no_token(
    verifier: JwtVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "MAX_CACHED_TOKENS", 5)
    made = [token(jti=number) for number in range(20)]
    for each in made:
        assert await verifier.verify(each) == ALICE
    known = verifier._cache
    assert list(known) == [hashlib.sha256(each.encode()).digest() for each in made[-5:]]


@requirement("P-24", "SRV-608")
async def test_the_log_has_reasons_and_no_tokens(verifier: JwtVerifier, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for made in BAD.values():
        bad = made()
        caplog.clear()
        assert await verifier.verify(bad) is None
        assert caplog.text.count("token refused: ") == 1
        assert not any(len(part) > 20 and part in caplog.text for part in bad.split("."))


async def test_after_close_nothing_is_fetched(issuer: Issuer, clock: Clock) -> None:
    issuer.publish(*PUBLIC)
    issuer.released.clear()
    verifier = JwtVerifier(issuer=ISSUER, audience=AUDIENCE, jwks_url=issuer.url, clock=clock)
    waiting = asyncio.create_task(verifier.verify(token()))
    await issuer.arrived.wait()
    await verifier.close()
    assert await waiting is None
    clock.now += 100
    assert await verifier.verify(token()) is None
    assert len(issuer.asked) == 1


# ---------------------------------------------------------------- construction

GIVEN: Object = {"issuer": ISSUER, "audience": AUDIENCE, "keys": {"keys": PUBLIC}}
REMOTE: Object = {"issuer": ISSUER, "audience": AUDIENCE}


@requirement("P-24")
@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (GIVEN | {"algorithms": ["RS256", "HS256"]}, "only signatures by public keys"),
        (GIVEN | {"algorithms": ["none"]}, "only signatures by public keys"),
        (GIVEN | {"algorithms": []}, "only signatures by public keys"),
        (GIVEN | {"algorithms": "RS256"}, "algorithms: expected a list or set of texts, got one text"),
        (GIVEN | {"algorithms": ["RS512"], "keys": {"keys": [public("ec")]}}, "no public key among them"),
        (GIVEN | {"keys": {"keys": []}}, "no public key among them"),
        (GIVEN | {"keys": {"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}}, "no public key among them"),
        (GIVEN | {"keys": {}}, "keys"),
        (GIVEN | {"audience": ""}, "audience"),
        (GIVEN | {"audience": []}, "audience"),
        (GIVEN | {"issuer": ""}, "issuer"),
        (GIVEN | {"issuer": "https://id.example#x"}, "issuer"),
        (GIVEN | {"leeway": -1}, "leeway"),
        (GIVEN | {"leeway": 86400}, "leeway"),
        (GIVEN | {"required_scopes": "orders:read"}, "required_scopes: expected a list or set of texts"),
        (GIVEN | {"jwks_url": "https://id.example/keys"}, "jwks_url or keys"),
        (REMOTE, "jwks_url or keys"),
        (REMOTE | {"jwks_url": "http://id.example/keys"}, "https is needed"),
        (REMOTE | {"jwks_url": "http://127.0.0.1.evil.example/keys"}, "https is needed"),
        (REMOTE | {"jwks_url": "http://localhost.evil.example/keys"}, "https is needed"),
        (REMOTE | {"jwks_url": "http://localhost@evil.example/keys"}, "https is needed"),
        (REMOTE | {"jwks_url": "https://us:hunter2@id.example/keys"}, "no password"),
        (REMOTE | {"jwks_url": "file:///etc/keys"}, "https is needed"),
        (REMOTE | {"jwks_url": ""}, "https is needed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_safe_prevents_the_start(given: Object, complaint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=complaint) as refused:
        JwtVerifier(**given)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["https://id.example/k", "http://localhost:1/k", "http://127.0.0.2/k", "http://[::1]/k"]
)
def test_where_keys_may_come_from(url: str) -> None:
    JwtVerifier(**REMOTE, jwks_url=url)


@pytest.mark.parametrize(("package", "extra"), [("joserfc", "auth"), ("aiohttp", "http")])
def test_a_missing_package_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch, package: str, extra: str) -> None:
    for name in [*sys.modules]:
        if name.split(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"python -m pip install '.*the extra '{extra}'"):
        JwtVerifier(**REMOTE, jwks_url="https://id.example/keys")
    if package == "joserfc":
        Introspection("https://id.example/introspect", "us", "s" * 16, audience=AUDIENCE)


# ---------------------------------------------------------------- introspection

SECRET = "k8:/ +ä" + "x" * 16


@pytest.fixture
async def asking(issuer: Issuer, clock: Clock) -> AsyncIterator[Introspection]:
    issuer.say(**CLAIMS, active=True)
    it = Introspection(issuer.url, "our server", SECRET, audience=AUDIENCE, issuer=ISSUER, clock=clock)
    yield it
    await it.close()


async def test_the_authorization_server_is_asked_as_rfc_7662_says(asking: Introspection, issuer: Issuer) -> None:
    assert await asking.verify("opaque+token/==") == ALICE
    [(head, body)] = issuer.asked
    assert head.startswith("POST /keys HTTP/1.1\r\n")
    assert "Content-Type: application/x-www-form-urlencoded\r\n" in head
    assert parse_qs(body) == {"token": ["opaque+token/=="], "token_type_hint": ["access_token"]}
    basic = next(line for line in head.split("\r\n") if line.startswith("Authorization: Basic "))
    name, _, secret = b64decode(basic.split()[2]).decode().partition(":")
    assert (unquote_plus(name), unquote_plus(secret)) == ("our server", SECRET)


@requirement("P-24", "SRV-608")
@pytest.mark.parametrize(
    "changes",
    [
        {"active": False},
        {"active": None},
        {"active": "true"},
        {"active": 1},
        {"aud": None},
        {"aud": "https://other.example"},
        {"iss": "https://evil.example"},
        {"exp": NOW - 31},
        {"exp": "soon"},
        {"nbf": NOW + 31},
        {"sub": None},
        {"sub": ""},
    ],
    ids=str,
)
async def test_an_answer_that_is_not_for_us_is_nobody(asking: Introspection, issuer: Issuer, changes: Object) -> None:
    answer = {**CLAIMS, "active": True, **changes}
    issuer.say(**{name: value for name, value in answer.items() if value is not None})
    assert await asking.verify("token") is None


async def test_what_may_be_missing_in_an_answer(asking: Introspection, issuer: Issuer, clock: Clock) -> None:
    issuer.say(active=True, sub="alice", aud=[AUDIENCE], scope="orders:read", client_id="x")
    assert await asking.verify("token") == ALICE
    nameless = Introspection(issuer.url, "us", "s" * 16, audience=AUDIENCE, clock=clock)
    assert await nameless.verify("token") == Principal(f"{issuer.url}#alice", ALICE.scopes)


@requirement("P-24")
async def test_a_good_answer_is_remembered_for_seconds_and_a_bad_one_is_not(
    asking: Introspection, issuer: Issuer, clock: Clock
) -> None:
    assert [await asking.verify("token") for _ in range(5)] == [ALICE] * 5
    assert len(issuer.asked) == 1
    issuer.say(active=False)
    clock.now += 9
    assert await asking.verify("token") == ALICE
    clock.now += 1
    assert await asking.verify("token") is None
    issuer.say(**CLAIMS | {"exp": clock.now + 3}, active=True)
    assert await asking.verify("token") == ALICE
    clock.now += 3
    issuer.say(active=False)
    assert await asking.verify("token") is None  # remembered no longer than it is good
    assert len(issuer.asked) == 4


@requirement("P-24")
async def test_many_with_one_token_ask_once_and_each_gets_its_own_answer(asking: Introspection, issuer: Issuer) -> None:
    issuer.answer = lambda body: json.dumps({**CLAIMS, "active": True, "sub": parse_qs(body)["token"][0]}).encode()
    tokens = [f"token{number % 5}" for number in range(100)]
    found = await asyncio.gather(*map(asking.verify, tokens))
    assert [who and who.id for who in found] == [f"{ISSUER}#{each}" for each in tokens]
    assert len(issuer.asked) == 5


@requirement("P-24")
async def test_too_many_questions_are_refused_and_those_under_way_are_answered(
    asking: Introspection, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.oauth.http.MAX_FLIGHTS", 3)
    issuer.released.clear()
    first = [asyncio.create_task(asking.verify(f"token{number}")) for number in range(3)]
    await issuer.arrived.wait()
    assert await asking.verify("token3") is None
    issuer.released.set()
    assert await asyncio.gather(*first) == [ALICE] * 3
    assert await asking.verify("token3") == ALICE


@requirement("P-24")
@pytest.mark.parametrize(
    "answer", [None, b"", b"nonsense", b"[true]", b'{"active":true}' + b" " * 70_000, b'{"x":' + b"[" * 9999]
)
async def test_an_authorization_server_that_makes_no_sense(
    asking: Introspection, issuer: Issuer, answer: bytes | None
) -> None:
    issuer.answer = answer
    assert await asking.verify("token") is None
    for bad in ("", "a token", "tökén", "x" * 20_000):
        assert await asking.verify(bad) is None
    assert len(issuer.asked) == 1  # what cannot be a token is not asked about


async def test_a_slow_authorization_server_and_one_who_does_not_wait(issuer: Issuer, clock: Clock) -> None:
    issuer.released.clear()
    asking = Introspection(issuer.url, "us", "s" * 16, audience=AUDIENCE, deadline=0.05, clock=clock)
    impatient = asyncio.create_task(asking.verify("token"))
    await issuer.arrived.wait()
    impatient.cancel()
    assert await asking.verify("token") is None
    await asking.close()
    assert await asking.verify("another") is None
    assert len(issuer.asked) == 1


@requirement("P-24")
@pytest.mark.parametrize("secret", ["", "secret", "changeme", "x" * 15])
def test_a_weak_client_secret_prevents_the_start(secret: str) -> None:
    with pytest.raises(ValueError, match="client_secret: weak"):
        Introspection("https://id.example/introspect", "us", secret, audience=AUDIENCE)
    with pytest.raises(ValueError, match="https is needed"):
        Introspection("http://id.example/introspect", "us", "s" * 16, audience=AUDIENCE)
