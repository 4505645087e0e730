"""A copy of Kubernetes' objects, kept by lists and watch events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from llmserve.discovery.endpoints import Pod
from llmserve.discovery.mirror import Expired, Mirror, Refused


def pod(name: str, version: int, address: str = "10.0.0.1") -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "status": {"podIP": address}}


def line(kind: str, thing: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode()


def listed(*pods: dict[str, Any], version: int = 5) -> Mirror[Pod]:
    mirror = Mirror(Pod)
    mirror.listed(json.dumps({"metadata": {"resourceVersion": str(version)}, "items": pods}).encode())
    return mirror


def test_events_change_what_was_listed_and_the_version_follows() -> None:
    mirror = listed(pod("a", 1), pod("b", 2))
    assert mirror.take(line("ADDED", pod("c", 6)))
    assert mirror.take(line("MODIFIED", pod("a", 7, "10.0.0.9")))
    assert mirror.take(line("DELETED", pod("b", 8)))
    assert {name: seen.status.pod_ip for name, seen in mirror.objects.items()} == {"a": "10.0.0.9", "c": "10.0.0.1"}
    assert mirror.version == "8"


def test_a_bookmark_moves_the_version_alone() -> None:
    mirror = listed(pod("a", 1))
    assert not mirror.take(line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "90"}}))
    assert (mirror.version, list(mirror.objects)) == ("90", ["a"])


def test_after_an_expired_version_objects_stay_until_they_are_listed_again() -> None:
    mirror = listed(pod("a", 1))
    with pytest.raises(Expired):
        mirror.take(line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}))
    assert (mirror.version, list(mirror.objects)) == ("", ["a"])


def test_another_error_is_told_and_the_version_stays() -> None:
    mirror = listed(pod("a", 1))
    with pytest.raises(Refused, match="etcd leader changed"):
        mirror.take(line("ERROR", {"kind": "Status", "code": 500, "message": "etcd leader changed"}))
    assert mirror.version == "5"


def test_what_is_not_understood_makes_a_new_list_necessary() -> None:
    mirror = listed(pod("a", 1))
    with pytest.raises(msgspec.MsgspecError):
        mirror.take(b"half a li")
    assert mirror.version == ""


def test_an_event_of_a_kind_from_later_versions_passes() -> None:
    mirror = listed(pod("a", 1))
    mirror.take(line("RENAMED", pod("a", 9)))
    assert (mirror.version, list(mirror.objects)) == ("9", ["a"])
