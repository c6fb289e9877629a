"""The container, compose and cluster files of examples/fleet: their form, and what they promise. They are not run."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from handrail.config import load_config
from paths import ROOT

FOLDER = ROOT / "examples" / "fleet"
MANIFESTS: list[dict[str, Any]] = [*yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text("utf-8"))]
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))
API = {"Deployment": "apps/v1", "Service": "v1", "PodDisruptionBudget": "policy/v1"}


def manifest(kind: str) -> dict[str, Any]:
    [only] = [each for each in MANIFESTS if each["kind"] == kind]
    return only


def container() -> dict[str, Any]:
    [only] = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(only)


@pytest.mark.parametrize("kind", API)
def test_each_manifest_is_of_the_api_that_has_it(kind: str) -> None:
    assert (manifest(kind)["apiVersion"], manifest(kind)["metadata"]["name"]) == (API[kind], "shop")


def test_every_selector_finds_the_pods() -> None:
    deployment = manifest("Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("Service")["spec"]["selector"] == labels
    assert manifest("PodDisruptionBudget")["spec"]["minAvailable"] < deployment["replicas"]


def test_a_pod_is_no_root_and_writes_nowhere_but_in_memory() -> None:
    pod, only = manifest("Deployment")["spec"]["template"]["spec"], container()
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert [each["emptyDir"]["medium"] for each in pod["volumes"]] == ["Memory"]


def test_probes_name_a_host_that_is_answered_and_the_port_that_is_served() -> None:
    only = container()
    for probe, path in (("startupProbe", "/healthz"), ("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        get = only[probe]["httpGet"]
        assert (get["path"], get["httpHeaders"]) == (path, [{"name": "Host", "value": "localhost"}])
        assert get["port"] in {each["name"] for each in only["ports"]}
    grace = manifest("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > int(only["lifecycle"]["preStop"]["exec"]["command"][1]) + 5


def test_no_secret_stands_in_a_manifest() -> None:
    environment = {each["name"]: each for each in container()["env"]}
    for name in ("HANDRAIL_KEY", "HANDRAIL_STORE", "HANDRAIL_AUDIT"):
        assert environment[name].keys() == {"name", "valueFrom"}
    assert "password" not in json.dumps(MANIFESTS).lower()


def test_compose_keeps_the_engines_inside_and_what_they_hold_durable() -> None:
    services = COMPOSE["services"]
    assert [name for name, each in services.items() if "ports" in each] == ["nginx"]
    assert all(port.startswith("127.0.0.1:") for port in services["nginx"]["ports"])
    redis = services["redis"]["command"]
    for setting in ("--appendonly yes", "--appendfsync always", "--maxmemory-policy noeviction"):
        assert setting in redis
    volumes = [each.partition(":")[0] for name in ("redis", "postgres") for each in services[name]["volumes"]]
    assert {*volumes} == COMPOSE["volumes"].keys()
    shop = services["shop"]
    assert shop["read_only"] and shop["cap_drop"] == ["ALL"]
    assert shop["deploy"]["replicas"] >= 2


def test_the_container_file_is_multi_stage_without_root_and_with_a_health_check() -> None:
    text = (FOLDER / "Containerfile").read_text("utf-8")
    instructions = re.findall(r"^([A-Z]+) ", text, re.MULTILINE)
    assert instructions.count("FROM") == 2
    assert {"USER", "HEALTHCHECK", "STOPSIGNAL", "EXPOSE"} <= {*instructions}
    assert instructions.index("USER") < instructions.index("CMD")
    copied = re.search(r"^COPY ((?!--)\S.*) /srv/$", text, re.MULTILINE)
    assert copied is not None
    assert all((FOLDER / name).is_file() for name in copied[1].split())


def test_the_configuration_of_the_fleet_can_be_used() -> None:
    assert load_config(FOLDER / "handrail.toml").approvals.by == "operator"
