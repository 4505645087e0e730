"""What a server and the controller of its cluster tell each other once a second: POST /admin/peers.

The server tells how many requests came, by stream and model and by limited key, what its shares were served, and how
many engines it could use. The controller deals the keys' limits between the gateways, tells groups what other groups
have served, plans groups and asks for machines by that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from llmserve.gateway.bodies import BodyLimits, read_body
from llmserve.live.cluster import LiveCluster
from llmserve.live.journal import Step
from llmserve.scheduling.messages import SHARES_MAX, RequestArrived, ServedElsewhere
from llmserve.tenants.limits import KeyLimits

PAIRS_MAX = 10_000  # (stream, model) pairs that are counted apart


class Served(msgspec.Struct, frozen=True):
    """Weighted tokens (scheduling/fair.py) by share. models : that compete for the same engines"""

    models: Annotated[tuple[str, ...], Meta(min_length=1)]
    tokens: Mapping[str, float] = {}


class ToServer(msgspec.Struct, frozen=True):
    """parts : of the limits that the server may use from now on, by key.  elsewhere : what other groups have served"""

    parts: Mapping[str, Annotated[float, Meta(ge=0, le=1)]] = {}
    elsewhere: tuple[Served, ...] = ()


_TO_SERVER = msgspec.json.Decoder(ToServer)


class FromServer(msgspec.Struct, frozen=True):
    """Since the exchange before; at the first one nothing has been counted.

    arrivals  requests by stream and model.  asked : requests by limited key, also refused ones
    parts     of the limits, which the server uses now, by key; only keys that asked, or were given a part
    wanted    engines that the server could use now, by model
    served    of a group; of an exchange with something in `elsewhere` nothing: the next one tells it
    """

    arrivals: tuple[tuple[str, str, int], ...] = ()
    asked: Mapping[str, int] = {}
    parts: Mapping[str, float] = {}
    wanted: Mapping[str, int] = {}
    served: tuple[Served, ...] = ()


class Peers:
    """Counts from the first exchange on, as a listener of the cluster's journal: most servers have no controller."""

    def __init__(self, cluster: LiveCluster, limits: KeyLimits) -> None:
        self._cluster = cluster
        self._limits = limits
        self._arrivals: Counter[tuple[str, str]] = Counter()
        self._counting = False

    def _observe(self, step: Step) -> None:
        if isinstance(step.event, RequestArrived):
            stream, model = step.event.request.stream, self._cluster.fleet.model_of(step.event.request.model)
            pair = stream, model
            if pair not in self._arrivals and len(self._arrivals) >= PAIRS_MAX:
                pair = "", model
            self._arrivals[pair] += 1

    def exchange(self, body: bytes) -> FromServer:
        """Raises BadRequest."""
        if not self._counting:
            self._counting = True
            self._cluster.journal.listen(self._observe)
        told, _ = read_body(_TO_SERVER, body, BodyLimits())
        self._limits.use_quotas(told.parts)
        for elsewhere in told.elsewhere:
            self._charge(elsewhere)
        arrivals, self._arrivals = self._arrivals, Counter()
        asked = self._limits.asked()
        parts = {name: self._limits.quota_of[name] for name in {*asked, *told.parts} & self._limits.quota_of.keys()}
        return FromServer(
            tuple((stream, model, count) for (stream, model), count in arrivals.items()),
            asked,
            parts,
            self._cluster.estimator.engines_wanted(),
            tuple([Served(*row) for row in self._cluster.scheduler.group.served()]) if not told.elsewhere else (),
        )

    def _charge(self, elsewhere: Served) -> None:
        rows = list(elsewhere.tokens.items())
        for start in range(0, len(rows), SHARES_MAX):
            self._cluster.driver.step(ServedElsewhere(elsewhere.models[0], dict(rows[start : start + SHARES_MAX])))
