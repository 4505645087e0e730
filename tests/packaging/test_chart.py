"""The chart, rendered by Helm's own code: what Kubernetes gets is what its API and the server accept."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from configured import load_config

from llmserve import __version__
from llmserve.__main__ import parser
from llmserve.settings.load import sections
from llmserve.settings.tree import Config

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("CHART_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="CHART_PYTHON names no environment of scripts/environment-chart"),
]
KEYS = {"keySecret": "keys"}
SITUATIONS: dict[str, dict[str, Any]] = {
    "keys": KEYS,
    "anyone": {"anonymous": True},
    "doors": {
        **KEYS,
        "engines": ["http://group:8000"],
        "engineKeySecret": "doors",
        "replicas": 3,
        "args": ["--engines-are-groups"],
    },
    "a group": {"engines": ["k8s:vllm"], "gatewayKeySecret": "doors"},
    "a pool": {**KEYS, "engines": ["inferencepool:vllm"]},
    "a name": {**KEYS, "engines": ["dns:vllm:8000"]},
    "HTTPS": {**KEYS, "tlsSecret": "certificate"},
    "state": {**KEYS, "stateClaim": "learnt"},
    "scaling": {**KEYS, "scaling": {"target": "vllm", "max": 4}},
    "an image by its digest": {**KEYS, "image": {"repository": "registry/llmserve", "digest": "sha256:" + "0" * 64}},
    "no metrics": {**KEYS, "metricsPort": 0},
    "where pods go": {
        **KEYS,
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "podAnnotations": {"a": "b"},
    },
    "large numbers": {**KEYS, "buffersBytesMax": 17_179_869_184, "drainSeconds": 3600, "args": ["--slo-ms", "30000"]},
}


def render(values: dict[str, Any]) -> dict[str, Any]:
    """What tests/kit/helm_chart.py prints."""
    printed: dict[str, Any] = json.loads(_printed(json.dumps(values)))
    return printed


@cache
def _printed(values: str) -> str:
    command = [str(PYTHON), str(ROOT / "tests" / "kit" / "helm_chart.py")]
    done = subprocess.run(command, input=values, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The manifests by kind; each kind is there once."""
    manifests = render(values)["manifests"]
    by_kind = {manifest["kind"]: manifest for manifest in manifests}
    assert len(by_kind) == len(manifests)
    return by_kind


@pytest.mark.parametrize("situation", SITUATIONS)
def test_kubernetes_accepts_the_chart(situation: str) -> None:
    assert render(SITUATIONS[situation])["wrong"] == []


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_server_accepts_the_flags_of_the_pod(situation: str) -> None:
    values = SITUATIONS[situation]
    pod = rendered(values)["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args, unknown = parser("serve").parse_known_args(["serve", "--host", "0.0.0.0", *container["args"]])
    assert unknown == []
    names = {name for struct in sections(Config).values() for name in struct.__struct_fields__}
    config = load_config({name: value for name, value in vars(args).items() if name in names}, {}, None)
    config.engines.check()
    assert config.engines.engine == tuple(values.get("engines", ["http://vllm:8000"]))
    assert config.server.drain_s < pod["terminationGracePeriodSeconds"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    server = config.server
    for file in (server.api_key_file, server.tls_cert, server.state):
        assert file is None or any(file.startswith(mount) for mount in mounts), file
    assert all(isinstance(word, str) for word in container["args"])


def test_keys_or_consent_are_needed_and_one_queue_has_one_replica() -> None:
    for values, why in (
        ({}, "set keySecret to a Secret with keys, or set anonymous=true"),
        ({"gatewayKeySecret": "doors", "replicas": 2}, "gatewayKeySecret is for one replica"),
        ({**KEYS, "stateClaim": "learnt", "replicas": 2}, "stateClaim is for one replica"),
    ):
        assert why in render(values)["refused"]


def test_what_a_release_has_depends_on_what_it_does() -> None:
    least = {"Deployment", "Service", "ServiceAccount"}
    assert rendered(KEYS).keys() == least
    assert rendered(SITUATIONS["doors"]).keys() == least | {"PodDisruptionBudget"}
    assert rendered(SITUATIONS["a group"]).keys() == least | {"Role", "RoleBinding"}
    assert rendered(SITUATIONS["scaling"]).keys() == least | {"ScaledObject"}


def test_a_token_of_the_api_is_in_pods_that_watch_and_in_no_others() -> None:
    for situation, watches in (("a group", True), ("a pool", True), ("a name", False), ("keys", False)):
        pod = rendered(SITUATIONS[situation])["Deployment"]["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is watches, situation


def test_probes_speak_https_where_the_server_does() -> None:
    for situation, scheme in (("HTTPS", "HTTPS"), ("keys", "HTTP")):
        (container,) = rendered(SITUATIONS[situation])["Deployment"]["spec"]["template"]["spec"]["containers"]
        probes = [container[f"{name}Probe"]["httpGet"]["scheme"] for name in ("startup", "readiness", "liveness")]
        assert probes == [scheme] * 3


def test_the_pod_is_that_of_an_unprivileged_user_on_a_read_only_root() -> None:
    pod = rendered(KEYS)["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == 10001
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["image"] == f"llmserve:{__version__}"
    named = rendered(SITUATIONS["an image by its digest"])["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert named["image"] == f"registry/llmserve@sha256:{'0' * 64}"


def test_a_mistake_in_a_manifest_is_found() -> None:
    """An affinity that Kubernetes does not know: the schemas are the strict ones."""
    (fault, *others) = render({**KEYS, "affinity": {"podAntiAfinity": {}}})["wrong"]
    assert "podAntiAfinity" in fault
    assert len(others) == 2, "in each version"
