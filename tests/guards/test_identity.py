"""API keys: who gets in, which keys prevent the start, and that time tells nothing."""

from __future__ import annotations

from hashlib import sha256
from hmac import compare_digest

import pytest

from handrail.guards import identity
from handrail.guards.identity import ApiKeys, Verifier
from handrail.model import Principal
from requirements import requirement

GOOD = "3Zr9-vKq0_TbYw7LxN2m"


def _hash(text: str) -> str:
    return f"sha256:{sha256(text.encode()).hexdigest()}"


@requirement("SRV-606")
async def test_a_key_is_its_principal_with_its_scopes() -> None:
    key, hashed = ApiKeys.new()
    other, hashed_other = ApiKeys.new()
    verifier: Verifier = ApiKeys({"alice": hashed, "bob": hashed_other}, scopes={"alice": {"orders:write"}})
    assert await verifier.verify(key) == Principal("alice", frozenset({"orders:write"}))
    assert await verifier.verify(other) == Principal("bob")
    assert verifier.metadata is None
    await verifier.close()


@requirement("P-24", "SRV-606")
@pytest.mark.parametrize("change", ["", "{key} ", "{key}x", "{hashed}", "hk_", "\udc80", "é" * 40, "x" * 100_000, "\0"])
async def test_p24_anything_else_is_nobody(change: str) -> None:
    key, hashed = ApiKeys.new()
    verifier = ApiKeys({"alice": hashed})
    assert await verifier.verify(change.format(key=key, hashed=hashed)) is None
    assert await verifier.verify(key[:-1]) is None
    assert await verifier.verify(key.swapcase()) is None


@requirement("P-24")
async def test_every_key_is_compared_wherever_the_right_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [ApiKeys.new() for _ in range(5)]
    verifier = ApiKeys({f"user{number}": hashed for number, (_, hashed) in enumerate(made)})
    compared: list[int] = []

    def counted(one: bytes, two: bytes) -> bool:
        compared.append(len(two))
        return compare_digest(one, two)

    monkeypatch.setattr(identity, "compare_digest", counted)
    for token in [made[0][0], made[2][0], made[4][0], "no such key", ""]:
        await verifier.verify(token)
        assert compared == [32] * 5  # hashes: the length of the token does not show either
        compared.clear()


def test_new_keys_are_random_and_long_enough() -> None:
    made = {ApiKeys.new()[0] for _ in range(100)}
    assert len(made) == 100 and all(len(key) == 46 for key in made)  # "hk_", then 256 bits
    key, hashed = ApiKeys.new()
    assert ApiKeys.hashed(key) == hashed and key not in hashed


@requirement("P-24")
@pytest.mark.parametrize(
    "key",
    [
        "",
        "changeme",
        "short-But-r4nd0m",
        "aaaaaaaaaaaaaaaaaaaaaaaa",
        "ChangeMe-ChangeMe-2024!",
        "my-Secret-key-for-prod",
        "correct-password-9371",
        "1234567890abcdefXYZ",
        "your-api-key-goes-here",
        "x7" * 20,
        "k3yZ" * 300,
    ],
)
def test_a_weak_key_prevents_the_start_and_is_not_repeated(key: str) -> None:
    if key == "short-But-r4nd0m":
        key = key[:-1]  # 15 characters; with 16 it would do
        assert ApiKeys.hashed(key + "m")
    with pytest.raises(ValueError, match="weak or default") as refused:
        ApiKeys.hashed(key)
    assert not key or key not in str(refused.value)


@requirement("P-24")
@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"alice": GOOD}, "alice: not a hashed key"),
        ({"alice": _hash(GOOD).upper()}, "alice: not a hashed key"),
        ({"alice": "sha256:"}, "alice: not a hashed key"),
        ({"alice": _hash("changeme")}, "alice: a weak or default key"),
        ({"alice": _hash("")}, "alice: a weak or default key"),
        ({"alice": _hash(GOOD), "bob": _hash(GOOD)}, "bob: alice has the same key"),
        ({"": _hash(GOOD)}, "not a name"),
        ({"local": _hash(GOOD)}, "not a name"),
        ({"anonymous": _hash(GOOD)}, "not a name"),
        ({"https://id.example#alice": _hash(GOOD)}, "not a name"),
    ],
)
def test_what_cannot_be_kept_as_a_key_prevents_the_start(keys: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        ApiKeys(keys)
    assert GOOD not in str(refused.value)


def test_scopes_are_of_somebody_and_words() -> None:
    with pytest.raises(ValueError, match=r"scopes\.mallory: there is no key of that name"):
        ApiKeys({"alice": _hash(GOOD)}, scopes={"mallory": {"admin"}})
    with pytest.raises(TypeError, match=r"scopes.alice: expected a list or set of texts, got one text"):
        ApiKeys({"alice": _hash(GOOD)}, scopes={"alice": "admin"})


async def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    key, hashed = ApiKeys.new()
    monkeypatch.setenv("HANDRAIL_API_KEYS", f"alice={hashed} orders:read orders:write;\n bob={_hash(GOOD)};")
    verifier = ApiKeys.from_environment()
    assert await verifier.verify(key) == Principal("alice", frozenset({"orders:read", "orders:write"}))
    assert await verifier.verify(GOOD) == Principal("bob")


@requirement("P-24")
@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        " ;\n; ",
        GOOD,
        f"{GOOD}=",
        f"alice={GOOD}",
        f"alice {_hash(GOOD)}",
        f"alice={_hash(GOOD)};alice={_hash(GOOD + 'x')}",
        f"alice={_hash('changeme')}",
    ],
)
def test_a_variable_without_good_keys_prevents_the_start(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("MY_KEYS", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEYS", value)
    with pytest.raises(ValueError, match=r"MY_KEYS|alice") as refused:
        ApiKeys.from_environment("MY_KEYS")
    assert GOOD not in str(refused.value)
