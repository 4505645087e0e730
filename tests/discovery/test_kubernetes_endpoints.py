"""The URLs that Kubernetes' objects tell of."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from llmserve.discovery.endpoints import EndpointSlice, InferencePool, Pod, of_pods, of_slices


def one(addresses: dict[str, Any], **fields: Any) -> EndpointSlice:
    """addresses : the conditions of each"""
    endpoints = [{"addresses": [address], "conditions": conditions} for address, conditions in addresses.items()]
    whole = {"metadata": {"name": "s"}, "addressType": "IPv4", "endpoints": endpoints}
    return msgspec.convert({**whole, "ports": [{"name": "", "port": 8000}], **fields}, EndpointSlice)


def test_ready_endpoints_count_and_those_that_terminate_do_not() -> None:
    terminating = {"ready": False, "serving": True, "terminating": True}
    found = one({"10.0.0.1": {"ready": True}, "10.0.0.2": {}, "10.0.0.3": {"ready": False}, "10.0.0.4": terminating})
    assert of_slices([found], "http", "") == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}


def test_an_endpoint_in_two_slices_is_one_engine() -> None:
    assert of_slices([one({"10.0.0.1": {}}), one({"10.0.0.1": {}, "10.0.0.2": {}})], "http", "") == {
        "http://10.0.0.1:8000",
        "http://10.0.0.2:8000",
    }


def test_of_two_kinds_of_addresses_one_counts() -> None:
    both = [one({"fd00::1": {}}, addressType="IPv6"), one({"10.0.0.1": {}})]
    assert of_slices(both, "https", "") == {"https://10.0.0.1:8000"}
    assert of_slices(both[:1], "http", "") == {"http://[fd00::1]:8000"}


@pytest.mark.parametrize(
    ("wanted", "port"), [("", "8000"), ("http", "8000"), ("metrics", "9000"), ("8123", "8123"), ("grpc", None)]
)
def test_of_several_ports_the_named_one_counts(wanted: str, port: str | None) -> None:
    found = one({"10.0.0.1": {}}, ports=[{"name": "metrics", "port": 9000}, {"name": "http", "port": 8000}])
    assert of_slices([found], "http", wanted) == ({f"http://10.0.0.1:{port}"} if port else set())


def test_a_slice_without_endpoints_or_ports_tells_of_none() -> None:
    assert of_slices([one({}, endpoints=None), one({"10.0.0.1": {}}, ports=None)], "http", "") == set()


def pool(spec: dict[str, Any]) -> InferencePool:
    return msgspec.convert({"metadata": {"name": "p"}, "spec": spec}, InferencePool)


def test_a_pool_of_either_version_tells_labels_and_ports() -> None:
    one = pool({"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}, {"number": 8001}]}).spec
    old = pool({"selector": {"app": "vllm"}, "targetPortNumber": 8000, "extensionRef": {"name": "epp"}}).spec
    assert (one.labels, one.ports) == ({"app": "vllm"}, [8000, 8001])
    assert (old.labels, old.ports) == ({"app": "vllm"}, [8000])


def test_ready_pods_are_engines_at_each_port() -> None:
    def pod(ready: str, **metadata: Any) -> Pod:
        status = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": ready}]}
        return msgspec.convert({"metadata": {"name": "p", **metadata}, "status": status}, Pod)

    ended = pod("True", deletionTimestamp="2026-11-28T06:00:00Z")
    starting = msgspec.convert({"metadata": {"name": "p"}, "status": {}}, Pod)
    assert of_pods({"a": pod("True"), "b": ended, "c": pod("False"), "d": starting}, "http", [1, 2]) == {
        "http://10.0.0.1:1",
        "http://10.0.0.1:2",
    }
