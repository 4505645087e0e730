"""Ways in which requests reach vLLM, and which of them take turns in a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ORDERS = ("fffs", "shortest", "edf")
ROUTER_POLICIES = ("round_robin", "power_of_two")
PARTS = ("idle", "burst", "poisson-0.7", "poisson-0.9", "trace", "routers", "barrier", "memory", "kill")


@dataclass(frozen=True)
class Arrangement:
    """How requests reach vLLM, and what is told about their lengths.

    way          "direct", "priority" (vLLM's own), an order of llmserve, a policy of vllm-router ("round_robin",
                 "power_of_two"), or "barrier"
    predictions  "oracle", "predicted", "random", or None: nothing is told
    bins         of a barrier
    bound        False: llmserve does not look at the engine's memory
    """

    way: str
    predictions: str | None = None
    bins: int = 1
    bound: bool = True

    @property
    def name(self) -> str:
        if self.way == "barrier":
            return "llmserve, barrier, " + ("no bins" if self.bins == 1 else f"{self.bins} bins")
        who = {"direct": "vLLM directly", "priority": "vLLM by priority"}
        who |= {policy: f"vllm-router {policy}" for policy in ROUTER_POLICIES}
        told = [self.predictions] if self.predictions else []
        return ", ".join(
            [who.get(self.way, f"llmserve {self.way}"), *told, *([] if self.bound else ["memory ignored"])]
        )


DIRECT = Arrangement("direct")
KINDS = ("oracle", "predicted", "random")


def arrangements_of(part: str, orders: Sequence[str]) -> list[Arrangement]:
    """Those that take turns in a part; orders: llmserve's that are measured."""
    if part == "barrier":
        return [Arrangement("barrier", "oracle", bins) for bins in (1, 8)]
    if part in ("idle", "kill"):
        return [DIRECT, Arrangement("fffs")]
    if part == "memory":
        bound = [Arrangement(order, kind) for order in ("fffs", "shortest") for kind in ("oracle", "predicted")]
        return [DIRECT, *bound, Arrangement("fffs", "oracle", bound=False)]
    told = {"fffs": (None,), "shortest": KINDS, "edf": KINDS if part == "burst" else ("predicted",)}
    if part == "routers":
        beside = [Arrangement(policy) for policy in ROUTER_POLICIES]
        told = {"fffs": (None,), "shortest": ("oracle", "predicted")}
    else:
        kinds = KINDS if part == "burst" else ("oracle", "predicted")
        beside = [DIRECT, *(Arrangement("priority", kind) for kind in kinds)]
    return beside + [Arrangement(order, kind) for order in orders for kind in told.get(order, ())]


def baselines_of(arrangement: Arrangement, names: Sequence[str]) -> dict[str, str]:
    """label -> name of each arrangement, among `names`, that this one is compared with."""
    found = {"direct": DIRECT.name} | {policy: Arrangement(policy).name for policy in ROUTER_POLICIES}
    if arrangement.predictions:
        found["priority"] = Arrangement("priority", arrangement.predictions).name
    found["no bins"] = Arrangement("barrier").name
    return {label: name for label, name in found.items() if name in names and name != arrangement.name}
