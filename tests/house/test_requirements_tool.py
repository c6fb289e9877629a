"""`make requirements`: Rev columns are read right, and a rule is ok only where its tests ran."""

from __future__ import annotations

import json

import pytest

from paths import ROOT, SUPPORT, TESTS
from tools.requirements import REVISIONS, RULES, TRANSPORTS, Rule, places, read_record, read_rules, report, revisions_of

pytest_plugins = ["pytester"]

ALL = "R0 R1 R2 R3 R4 R5 P"


@pytest.mark.parametrize(
    ("rev", "named"),
    [
        ("all", ALL),
        ("leg", "R0 R1 R2 R3 R4 P"),
        ("P", "P"),
        ("R0", "R0"),
        ("R5", "R5"),
        ("R0 R1", "R0 R1"),
        ("R3 R4", "R3 R4"),
        ("R4 R5", "R4 R5"),
        ("R3 R4 P", "R3 R4 P"),
        ("R0–R2", "R0 R1 R2"),
        ("R2-R4", "R2 R3 R4"),
        ("R2–R5", "R2 R3 R4 R5"),
        ("R3–R5", "R3 R4 R5"),
        ("R0–R3, P", "R0 R1 R2 R3 P"),
        ("R0–R4, P", "R0 R1 R2 R3 R4 P"),
        ("R1–R5, P", "R1 R2 R3 R4 R5 P"),
        ("R1+", "R1 R2 R3 R4 R5"),
        ("R3+", "R3 R4 R5"),
        ("R3+, P", "R3 R4 R5 P"),
        ("not R2", "R0 R1 R3 R4 R5 P"),
        ("not R2 HTTP", "R0 R1 R3 R4 R5 P"),
        ("all but P", "R0 R1 R2 R3 R4 R5"),
        ("R5 (all)", ALL),
        ("all (R0 no `message`)", ALL),
        ("R5 ext", "R5"),
        ("R4 R5 ext", "R4 R5"),
        ("stdio", ALL),
        ("stdio dual", ALL),
        ("HTTP dual", ALL),
        ("all HTTP", ALL),
        ("R3–R5 HTTP", "R3 R4 R5"),
        ("all×all", ALL),
        ("leg↔R5", ALL),
    ],
)
def test_rev_column_names_revisions(rev: str, named: str) -> None:
    assert " ".join(revisions_of(rev)) == named


@pytest.mark.parametrize("rev", ["R6", "some", "R3++", "2025-06-18", "all but"])
def test_a_rev_column_nobody_understands_is_an_error(rev: str) -> None:
    with pytest.raises(ValueError, match="Rev column"):
        revisions_of(rev)


@pytest.mark.parametrize(
    ("rev", "transports"),
    [("R5", ("stdio", "memory", "http")), ("stdio", ("stdio",)), ("R5 HTTP", ("http",)), ("all HTTP", ("http",))],
)
def test_a_transport_in_the_rev_column_narrows_it(rev: str, transports: tuple[str, ...]) -> None:
    assert {transport for _, transport in places(rev)} == set(transports)


def test_every_row_of_the_list_is_understood() -> None:
    rules = list(read_rules(RULES.read_text("utf-8")))
    assert len({rule.id for rule in rules}) == len(rules)
    ids = {rule.id for rule in rules}
    assert {"SRV-101", "SRV-522", "SRV-614", "CLI-45", "GW-22", "APP-20", "P-01", "P-35"} <= ids
    assert {"SRV-701", "SRV-714", "SRV-725", "SRV-733", "SRV-743", "CLI-55", "APP-31"} <= ids
    assert all(rule.needs for rule in rules)


RULE = Rule(id="SRV-901", rev="R4 R5", section="9 Sample")
EVERYWHERE = {(REVISIONS[name], transport) for name in ("R4", "R5") for transport in TRANSPORTS}


@pytest.mark.parametrize(
    ("seen", "line"),
    [
        (EVERYWHERE, "  ok    SRV-901"),
        ({("*", "*")}, "  ok    SRV-901"),
        (set(), "  none  SRV-901"),
        ({("pocket", "stdio")}, "  none  SRV-901"),
        (EVERYWHERE - {("2026-07-28", "memory")}, "  part  SRV-901  missing: memory R5"),
        (EVERYWHERE - {("2025-11-25", "http")}, "  part  SRV-901  missing: http R4"),
    ],
)
def test_a_rule_is_ok_only_when_seen_in_every_place(seen: set[tuple[str, str]], line: str) -> None:
    lines, _ = report([RULE], {"SRV-901": seen})
    assert line in lines


@pytest.mark.parametrize("strict", [["9"], ["SRV-901"]])
def test_strict_insists_on_sections_and_ids(strict: list[str]) -> None:
    assert report([RULE], {"SRV-901": EVERYWHERE}, strict)[1]
    assert not report([RULE], {}, strict)[1]
    assert report([RULE], {}, [])[1]


def test_strict_lets_pass_what_is_excepted_and_nothing_else() -> None:
    excepted, other = Rule("SRV-509", "R4 R5", "5 Asking"), Rule("SRV-201", "all HTTP", "5 Asking")
    assert report([excepted], {}, ["5"])[1]
    assert not report([excepted, other], {}, ["5"])[1]
    assert report([excepted, other], {"SRV-201": set(places("all HTTP"))}, ["5"])[1]


def test_strict_refuses_a_section_that_does_not_exist() -> None:
    assert not report([RULE], {}, ["77"])[1]


def test_the_record_is_read_by_id() -> None:
    record = '{"t::a": {"ids": ["P-01", "P-02"], "ran": [["pocket", "stdio"]]}, "t::b": {"ids": ["P-01"], "ran": []}}'
    assert read_record(record) == {"P-01": {("pocket", "stdio")}, "P-02": {("pocket", "stdio")}}


SAMPLE = """
    import pytest
    from requirements import requirement, record_ran

    @pytest.fixture(params=["2025-11-25", "2026-07-28"])
    def spoken(request):
        record_ran(request, request.param, "memory")

    @requirement("SRV-413")
    def test_passes(spoken): ...

    @requirement("SRV-412")
    def test_fails(ran):
        ran("2024-10-07", "stdio")
        assert 0

    @requirement("SRV-411")
    @pytest.mark.xfail
    def test_is_expected_to_fail(ran):
        ran("2024-10-07", "stdio")
        assert 0

    @requirement("SRV-410")
    def test_breaks_while_cleaning_up(ran, request):
        ran("2024-10-07", "stdio")
        request.addfinalizer(lambda: 1 / 0)

    @requirement("SRV-409")
    def test_says_nothing_of_where_it_ran(): ...

    @requirement("SRV-304", everywhere=True)
    def test_of_registration(): ...
"""


@pytest.fixture
def run_of_its_own(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A test session in a folder of its own, with our plugin."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{SUPPORT}")
    pytester.makeconftest((TESTS / "conftest.py").read_text("utf-8"))
    pytester.makeini("[pytest]\ntestpaths = .\naddopts = -p no:asyncio\nmarkers = requirement")
    return pytester


def test_only_a_passed_test_counts_and_only_where_it_ran(run_of_its_own: pytest.Pytester) -> None:
    run_of_its_own.makepyfile(SAMPLE)
    run_of_its_own.runpytest_subprocess()
    record = (run_of_its_own.path / ".requirements.json").read_text("utf-8")
    assert read_record(record) == {
        "SRV-304": {("*", "*")},
        "SRV-409": set(),
        "SRV-413": {("2025-11-25", "memory"), ("2026-07-28", "memory")},
    }


def test_a_run_of_a_few_tests_changes_only_their_part_of_the_record(run_of_its_own: pytest.Pytester) -> None:
    run_of_its_own.makepyfile(SAMPLE)
    run_of_its_own.runpytest_subprocess()
    record = run_of_its_own.path / ".requirements.json"
    before = json.loads(record.read_text("utf-8"))
    run_of_its_own.makepyfile(SAMPLE.replace("def test_of_registration(): ...", "def test_of_registration(): assert 0"))
    run_of_its_own.runpytest_subprocess("-k", "registration")
    after = json.loads(record.read_text("utf-8"))
    assert [name for name in before if name not in after] == [name for name in before if "registration" in name]


def test_an_id_that_is_not_in_the_list_stops_the_run(run_of_its_own: pytest.Pytester) -> None:
    run_of_its_own.makepyfile('from requirements import requirement\n@requirement("SRV-999")\ndef test_x(): ...')
    result = run_of_its_own.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*test_x: SRV-999 is not in docs/requirements.md"])


@pytest.mark.parametrize(("required", "outcome"), [("", "skipped"), ("1", "failed")])
def test_a_missing_peer_skips_its_test_or_fails_it(
    run_of_its_own: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, required: str, outcome: str
) -> None:
    monkeypatch.setenv("HANDRAIL_REQUIRE_PEERS", required)
    run_of_its_own.makepyfile('def test_x(installed_peer): installed_peer("nobody")')
    result = run_of_its_own.runpytest_subprocess("-rs")
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(["*nobody is not installed: run make peers*"])
