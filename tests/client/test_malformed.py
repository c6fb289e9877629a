"""Results whose members have the wrong type: the client tells, and in strict mode refuses."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from clients import ALL, R0, R1, R2, R3, R4, R5, OpenRig, P, open_rig
from handrail import CallResult, Client
from handrail.errors import InvalidResult
from requirements import requirement
from rigs import Object, Rig

__all__ = ["open_rig"]

BLOCKS = (R1, R2, R3, R4, P, R5)  # revisions with content blocks
PICTURE = "iVBORw0KGgo="
NOTE = {"uri": "note://1", "mimeType": "text/plain", "text": "hello"}


def result(revision: str) -> Object:
    """A good result, with every member the revision has."""
    if revision == R0:
        return {"toolResult": {"content": "anything"}, "_meta": {"example.org/a": 1}}
    notes = {"audience": ["user", "assistant"], "priority": 0.5}
    link = {"type": "resource_link", "uri": "note://2", "name": "second", "title": "Second", "size": 3}
    return {
        "content": [
            {"type": "text", "text": "hello", "annotations": notes, "_meta": {}},
            {"type": "image", "data": PICTURE, "mimeType": "image/png"},
            {"type": "resource", "resource": NOTE},
            link if revision in (R3, R4, P, R5) else {"type": "text", "text": "no link"},
            {"type": "hologram", "beams": 3},
        ],
        "isError": False,
        **({"structuredContent": {"a": 1}} if revision in (R3, R4, P, R5) else {}),
        **({"resultType": "complete"} if revision == R5 else {}),
        "_meta": {"example.org/a": 1},
    }


def changed(good: Object, place: str, value: Any) -> Object:
    made: Any = copy.deepcopy(good)
    *way, last = place.split("/")
    here = made
    for step in way:
        here = here[int(step) if step.isdigit() else step]
    here[int(last) if last.isdigit() else last] = value
    return made  # type: ignore[no-any-return]  # an object, as `good` is


# Where, what comes there, in which revisions it is wrong, and what is told.
WRONG = [
    ("isError", "yes", BLOCKS, 'isError: "yes" is not true or false'),
    ("isError", 1, BLOCKS, "isError: 1 is not true or false"),
    ("isError", None, BLOCKS, "isError: null is not true or false"),
    ("isError", {}, BLOCKS, "isError: {} is not true or false"),
    ("content", "text", BLOCKS, 'content: "text" is not a list of blocks'),
    ("content", None, BLOCKS, "content: null is not a list of blocks"),
    ("content", {"type": "text", "text": "x"}, BLOCKS, 'content: {"type":"text","text":"x"} is not a list of blocks'),
    ("content/0", "text", BLOCKS, 'content/0: "text" is not a block'),
    ("content/0", None, BLOCKS, "content/0: null is not a block"),
    ("content/0", {"text": "x"}, BLOCKS, 'content/0: {"text":"x"} is not a block: an object with a type'),
    ("content/0/type", 7, BLOCKS, "content/0: "),
    ("content/4/type", None, BLOCKS, "content/4: "),
    ("content/0/text", 7, BLOCKS, "content/0: not a well-formed text: Text.text: 7 is not a string"),
    ("content/0", {"type": "text"}, BLOCKS, "content/0: not a well-formed text: Missing required argument 'text'"),
    ("content/0/annotations", 7, BLOCKS, "content/0: not a well-formed text: Text.annotations: 7 is not a dict"),
    ("content/0/annotations/priority", "high", BLOCKS, "Text.annotations.priority: 'high' is not a number from 0 to 1"),
    ("content/0/annotations/audience", "user", BLOCKS, "content/0: not a well-formed text: Text.annotations.audience"),
    ("content/0/_meta", 7, BLOCKS, "content/0: not a well-formed text: Text.meta: 7 is not a dict"),
    ("content/1/data", "not base64!", BLOCKS, "content/1: not a well-formed image"),
    ("content/1/mimeType", None, BLOCKS, "content/1: not a well-formed image"),
    ("content/2/resource", "x", BLOCKS, "content/2: not a well-formed resource"),
    ("content/2/resource", {"uri": "note://1", "text": 7}, BLOCKS, "content/2: not a well-formed resource"),
    ("content/2/resource/_meta", 7, BLOCKS, "content/2: not a well-formed resource"),
    ("content/3/uri", 7, (R3, R4, P, R5), "content/3: not a well-formed resource_link"),
    ("content/3/size", "3", (R3, R4, P, R5), "content/3: not a well-formed resource_link"),
    ("content/3/icons", {}, (R3, R4, P, R5), "content/3: not a well-formed resource_link"),
    ("structuredContent", [1], (R3, R4, P), "structuredContent: [1] is not an object"),
    ("structuredContent", "x", (R3, R4, P), 'structuredContent: "x" is not an object'),
    ("structuredContent", None, (R3, R4, P), "structuredContent: null is not an object"),
    ("_meta", 7, ALL, "_meta: 7 is not an object"),
    ("_meta", None, ALL, "_meta: null is not an object"),
    ("_meta", {"io.handrail/risk": "x"}, ALL, '_meta/io.handrail/risk: "x" is not an object with a reason'),
]


async def given_result(said: Object, revision: str, **options: Any) -> CallResult:
    async with Client(Rig("echoes_result", revision), revision=revision, timeout=60.0, **options) as client:
        return await client.call("echo", {"result": said})


@requirement("CLI-24", "CLI-38")
@pytest.mark.parametrize("transport", ["memory", "http"])
@pytest.mark.parametrize(("place", "value", "revisions", "told"), WRONG)
async def test_a_member_of_the_wrong_type_is_told_and_in_strict_mode_an_error(
    open_rig: OpenRig, transport: str, place: str, value: Any, revisions: tuple[str, ...], told: str
) -> None:
    for revision in revisions:
        said = changed(result(revision), place, value)
        async with open_rig("echoes_result", revision, transport) as (client, _):
            found = await client.call("echo", {"result": said})
            assert found.raw == said
            assert len(found.problems) == 1 and told in found.problems[0], (revision, found.problems)
            if not place.startswith("content/"):
                assert told in found.for_model()
        async with open_rig("echoes_result", revision, transport, strict=True) as (client, _):
            with pytest.raises(InvalidResult, match="the result is malformed") as caught:
                await client.call("echo", {"result": said})
            assert told in str(caught.value) and caught.value.result.raw == said


@pytest.mark.parametrize("revision", ALL)
async def test_a_good_result_has_no_problems_in_strict_mode_either(revision: str) -> None:
    found = await given_result(result(revision), revision, strict=True)
    assert found.problems == [] and not found.is_error and "malformed" not in found.for_model()


@pytest.mark.parametrize("value", [[1], "x", None, 7, True])
async def test_structured_content_of_the_newest_revision_is_any_value(value: Any) -> None:
    found = await given_result(changed(result(R5), "structuredContent", value), R5, strict=True)
    assert found.problems == [] and found.data == value


@pytest.mark.parametrize("revision", BLOCKS)
async def test_a_result_without_content_is_read_as_empty_and_told(revision: str) -> None:
    said = {name: value for name, value in result(revision).items() if name != "content"}
    found = await given_result(said, revision)
    assert (found.text, found.content) == ("", [])
    assert found.problems == ["content: missing; it is a list of blocks"]


@pytest.mark.parametrize(("flag", "is_error"), [("yes", True), ("false", True), (0, True), ([], True), (None, False)])
@pytest.mark.parametrize("revision", BLOCKS)
async def test_an_error_flag_that_is_neither_true_nor_false_is_no_success(
    revision: str, flag: Any, is_error: bool
) -> None:
    found = await given_result(changed(result(revision), "isError", flag), revision)
    assert found.is_error is is_error and len(found.problems) == 1


TYPES: dict[str, type] = {
    "isError": bool,
    "content": list,
    "_meta": dict,
    "structuredContent": dict,
    "content/0": dict,
    "content/0/type": str,
    "content/0/text": str,
    "content/0/annotations": dict,
    "content/0/annotations/audience": list,
    "content/0/_meta": dict,
    "content/1/type": str,
    "content/1/data": str,
    "content/1/mimeType": str,
    "content/2/resource": dict,
    "content/2/resource/uri": str,
    "content/2/resource/text": str,
    "content/3/uri": str,
    "content/3/name": str,
    "content/3/title": str,
    "content/3/size": int,
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@requirement("CLI-24", "CLI-38")
@given(revision=st.sampled_from([R3, R4, P, R5]), place=st.sampled_from(sorted(TYPES)), value=JSON)
@settings(deadline=None, max_examples=150)
def test_no_member_of_a_wrong_type_passes_as_a_good_result(revision: str, place: str, value: Any) -> None:
    is_right = type(value) is TYPES[place] or (revision == R5 and place == "structuredContent")
    said = changed(result(revision), place, value)
    found = asyncio.run(given_result(said, revision))
    assert found.raw == said
    if not is_right:
        assert any(each.startswith("/".join(place.split("/")[:2])) for each in found.problems), found.problems
        with pytest.raises(InvalidResult):
            asyncio.run(given_result(said, revision, strict=True))
