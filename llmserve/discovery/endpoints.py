"""The URLs that Kubernetes' objects tell of: EndpointSlices of a Service, Pods of an InferencePool. Pure.

Only what is needed is read, so that later versions of the objects pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from llmserve.discovery.mirror import Metadata

USUAL_PORT = "http"  # name of the port that counts where a Service has several


class Conditions(msgspec.Struct):
    """ready : None counts as true, by the API's definition. An endpoint that terminates is not ready."""

    ready: bool | None = None


class Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: Conditions | None = None

    @property
    def ready(self) -> bool:
        return self.conditions is None or self.conditions.ready is not False


class Port(msgspec.Struct):
    """port : None: every port of the pods"""

    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, rename="camel"):
    """Some of the endpoints of a Service. An endpoint may be in two slices while it moves."""

    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class PodCondition(msgspec.Struct):
    type: str = ""
    status: str = ""


class PodStatus(msgspec.Struct):
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[PodCondition] | None = None


class Pod(msgspec.Struct):
    metadata: Metadata
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def ready(self) -> bool:
        conditions = {condition.type: condition.status for condition in self.status.conditions or ()}
        return conditions.get("Ready") == "True" and self.metadata.deletion_timestamp is None


class TargetPort(msgspec.Struct):
    number: int


class PoolSpec(msgspec.Struct, rename="camel"):
    """The part of an InferencePool that says where its engines are.

    selector     of v1: {"matchLabels": labels}; of v1alpha2: the labels themselves
    target_ports of v1: each is an engine of every pod.  target_port_number : of v1alpha2
    """

    selector: dict[str, Any] = {}
    target_ports: list[TargetPort] | None = None
    target_port_number: int | None = None

    @property
    def labels(self) -> dict[str, str]:
        labels = self.selector.get("matchLabels", self.selector)
        return {str(name): str(value) for name, value in labels.items()} if isinstance(labels, dict) else {}

    @property
    def ports(self) -> list[int]:
        numbers = [port.number for port in self.target_ports or ()]
        return numbers or ([self.target_port_number] if self.target_port_number is not None else [])


class InferencePool(msgspec.Struct):
    metadata: Metadata
    spec: PoolSpec = msgspec.field(default_factory=PoolSpec)


def of_slices(slices: Iterable[EndpointSlice], scheme: str, port: str) -> frozenset[str]:
    """The URLs of ready endpoints: at IPv4 addresses, or else at IPv6 addresses, for these are the same pods.

    port : a number, or the name of a port of the Service; "": the only one, or that named `http`
    """
    found: dict[str, set[str]] = {}
    for one in slices:
        number = _port(one.ports or [], port)
        ready = [endpoint.addresses[0] for endpoint in one.endpoints or () if endpoint.ready and endpoint.addresses]
        if number is not None and ready:
            found.setdefault(one.address_type, set()).update(
                _url(scheme, address, number, one.address_type == "IPv6") for address in ready
            )
    return frozenset(found.get("IPv4") or found.get("IPv6") or found.get("FQDN") or ())


def _port(ports: list[Port], wanted: str) -> int | None:
    if wanted.isdigit():
        return int(wanted)
    if len(ports) == 1 and not wanted:
        return ports[0].port
    named = [port.port for port in ports if port.name == (wanted or USUAL_PORT)]
    return named[0] if named else None


def of_pods(pods: Mapping[str, Pod], scheme: str, ports: Iterable[int]) -> frozenset[str]:
    """The URLs of ready pods, one for each port."""
    addresses = [pod.status.pod_ip for pod in pods.values() if pod.ready and pod.status.pod_ip]
    return frozenset([_url(scheme, address, port, ":" in address) for address in addresses for port in ports])


def _url(scheme: str, host: str, port: int, is_ipv6: bool) -> str:
    return f"{scheme}://[{host}]:{port}" if is_ipv6 else f"{scheme}://{host}:{port}"
