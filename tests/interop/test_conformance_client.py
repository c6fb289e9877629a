"""The official conformance suite against our client: every scenario it has for one, authorization included.

The suite plays the server and starts `conformance_client.py` for each scenario. All scenarios of a revision are judged
in one run, which all its tests read.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paths import SUPPORT
from patience import PATIENCE
from requirements import requirement
from tests.interop.test_conformance import conformance

Object = dict[str, Any]
InstalledPeer = Callable[[str], Path]

CLIENT = SUPPORT / "conformance_client.py"
SUITE_SECONDS = 10 * PATIENCE
SCENARIO_MS = "90000"  # all run at once, on as many processors as there are

pytestmark = [pytest.mark.peers, pytest.mark.asyncio(loop_scope="module")]

AUTH = [f"auth/metadata-{each}" for each in ("default", "var1", "var2", "var3")]
AUTH += [f"auth/scope-{each}" for each in ("from-www-authenticate", "from-scopes-supported", "omitted-when-undefined")]
AUTH += ["auth/scope-step-up", "auth/scope-retry-limit", "auth/basic-cimd", "auth/pre-registration"]
TOKEN_ENDPOINT = [f"auth/token-endpoint-auth-{each}" for each in ("basic", "post", "none")]
ISSUERS = "supported not-advertised supported-missing wrong-issuer unexpected normalized".split()
SCENARIOS = {
    "2025-03-26": ["auth/2025-03-26-oauth-metadata-backcompat", "auth/2025-03-26-oauth-endpoint-fallback"],
    "2025-06-18": ["initialize", "tools_call", *TOKEN_ENDPOINT],
    "2025-11-25": [
        *("initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry"),
        *("json-schema-2020-12-preservation", *AUTH, *TOKEN_ENDPOINT),
    ],
    "2026-07-28": [
        *("tools_call", "request-metadata", "sep-2322-client-request-state", "http-standard-headers"),
        *("http-custom-headers", "http-invalid-tool-headers", "json-schema-ref-no-deref"),
        *("json-schema-2020-12-preservation", *AUTH, *TOKEN_ENDPOINT, *(f"auth/iss-{each}" for each in ISSUERS)),
        *("auth/resource-mismatch", "auth/offline-access-scope", "auth/offline-access-not-supported"),
        *("auth/authorization-server-migration", "auth/metadata-issuer-mismatch"),
    ],
}
EXTENSIONS = ["auth/client-credentials-basic", "auth/client-credentials-jwt"]

_judged: dict[str, dict[str, list[Object]]] = {}


async def judge(peer: Path, revision: str, folder: Path) -> dict[str, list[Object]]:
    """What the suite found, by scenario."""
    if revision not in _judged:
        command = ["--command", f"{sys.executable} {CLIENT}", "--spec-version", revision, "--timeout", SCENARIO_MS]
        await conformance(peer, "client", *command, "--suite", "all", "-o", str(folder), seconds=SUITE_SECONDS)
        for scenario in EXTENSIONS if revision in ("2025-11-25", "2026-07-28") else ():
            forced = ["--scenario", scenario, "--force", "-o", str(folder)]
            await conformance(peer, "client", *command, *forced, seconds=SUITE_SECONDS)
        _judged[revision] = results(folder)
    return _judged[revision]


def results(folder: Path) -> dict[str, list[Object]]:
    found: dict[str, list[Object]] = {}
    for path in folder.rglob("checks.json"):
        name = re.sub(r"-\d{4}-\d\d-\d\dT.*$", "", path.parent.relative_to(folder).as_posix())
        found[name] = json.loads(path.read_text("utf-8"))
    return found


@requirement("CLI-42", "P-26")
@pytest.mark.parametrize(
    ("revision", "scenario"),
    [(revision, scenario) for revision, scenarios in SCENARIOS.items() for scenario in scenarios]
    + [(revision, scenario) for revision in ("2025-11-25", "2026-07-28") for scenario in EXTENSIONS],
)
async def test_scenario(
    revision: str,
    scenario: str,
    installed_peer: InstalledPeer,
    tmp_path: Path,
    ran: Callable[[str, str], None],
) -> None:
    found = await judge(installed_peer("conformance"), revision, tmp_path)
    assert scenario in found, sorted(found)
    checks = found[scenario]
    open_points = [
        f"{check['id']}: {check['status']} {check.get('errorMessage', '')}"
        for check in checks
        if check["status"] not in ("SUCCESS", "INFO", "SKIPPED")
    ]
    assert not open_points
    assert any(check["status"] == "SUCCESS" for check in checks), checks
    if scenario.startswith("auth/"):
        ran(revision, "http")


async def test_no_scenario_is_left_out(installed_peer: InstalledPeer) -> None:
    """Every scenario that is scored, and every other but the extensions nobody has built here."""
    listed = await conformance(installed_peer("conformance"), "list", seconds=30)
    clients = listed.partition("Client scenarios")[2].partition("\n\n")[0]
    known = {name: set(window.split(",")) for name, window in re.findall(r"- (\S+) \[(.+)\]", clients)}
    for revision, scenarios in SCENARIOS.items():
        applicable = {name for name, window in known.items() if revision in window}
        assert applicable <= set(scenarios), revision
    counts = {revision: len(set(scenarios) & known.keys()) for revision, scenarios in SCENARIOS.items()}
    assert (counts["2025-11-25"], counts["2026-07-28"]) == (19, 33)
