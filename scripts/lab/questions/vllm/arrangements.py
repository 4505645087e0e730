"""Arrangements: ways in which requests reach vLLM, and the arrangements that each part compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

ORDERS = ("fffs", "shortest", "boost", "edf")
ROUTER_POLICIES = ("round_robin", "power_of_two")
AHEAD = ("ahead-0.7", "ahead-0.9", "ahead-0.95")
PARTS = ("idle", "burst", "poisson-0.7", "poisson-0.9", "trace", "routers", "barrier", "memory", "own", *AHEAD, "kill")


@dataclass(frozen=True)
class Arrangement:
    """How requests reach vLLM, and with which predictions of their lengths.

    way          "direct", "priority" (vLLM's own), an order of llmserve, a policy of vllm-router ("round_robin",
                 "power_of_two"), or "barrier"
    predictions  "oracle", "predicted", "random", or None: requests carry no prediction
    bins         number of bins, with a barrier
    bound        False: llmserve ignores the engine's memory
    own          forecasts of llmserve itself, without a trained predictor: "" (off), "cold" (the server has seen no
                 answer), "warm" (it has the state of a server that answered as many other prompts), or "again" (it has
                 the state of a server that answered the same prompts)
    ahead        requests that llmserve sends ahead carry their turns as priorities
    before       llmserve is that of the checkout --before
    """

    way: str
    predictions: str | None = None
    bins: int = 1
    bound: bool = True
    own: str = ""
    ahead: bool = False
    before: bool = False

    @property
    def name(self) -> str:
        if self.way == "barrier":
            return "llmserve, barrier, " + ("no bins" if self.bins == 1 else f"{self.bins} bins")
        ways = {"direct": "vLLM directly", "priority": "vLLM by priority"}
        ways |= {policy: f"vllm-router {policy}" for policy in ROUTER_POLICIES}
        memory = None if self.bound else "memory ignored"
        own = f"own forecasts, {self.own}" if self.own else None
        ahead = "turns as priorities" if self.ahead else None
        before = "before" if self.before else None
        parts = [ways.get(self.way, f"llmserve {self.way}"), self.predictions, own, memory, ahead, before]
        return ", ".join(filter(None, parts))


DIRECT = Arrangement("direct")
KINDS = ("oracle", "predicted", "random")


def arrangements_of(part: str, orders: Sequence[str], ways: Sequence[str] = ()) -> list[Arrangement]:
    """The arrangements that take turns in a part. orders : of llmserve.  ways : of the arrangements; (): all"""
    return [arrangement for arrangement in _all_of(part, orders) if not ways or arrangement.way in ways]


def _all_of(part: str, orders: Sequence[str]) -> list[Arrangement]:
    if part == "barrier":
        return [Arrangement("barrier", "oracle", bins) for bins in (1, 8)]
    if part in ("idle", "kill"):
        return [DIRECT, Arrangement("fffs")]
    if part in AHEAD:
        ordered = [order for order in orders if order not in ("fffs", "edf")]
        sent = [Arrangement(order, "predicted", ahead=ahead) for order in ordered for ahead in (False, True)]
        return [DIRECT, Arrangement("priority", "predicted"), *sent]
    if part == "own":
        return [DIRECT, *[Arrangement("boost", own=own) for own in ("cold", "warm", "again")]]
    if part == "memory":
        bound = [Arrangement(order, kind) for order in ("fffs", "shortest") for kind in ("oracle", "predicted")]
        return [DIRECT, *bound, Arrangement("fffs", "oracle", bound=False)]
    kinds_of = {
        "fffs": (None,),
        "shortest": KINDS,
        "boost": ("predicted",),
        "edf": KINDS if part == "burst" else ("predicted",),
    }
    if part == "routers":
        baselines = [Arrangement(policy) for policy in ROUTER_POLICIES]
        kinds_of = {"fffs": (None,), "shortest": ("oracle", "predicted"), "boost": ("predicted",)}
    else:
        kinds = KINDS if part == "burst" else ("oracle", "predicted")
        baselines = [DIRECT, *(Arrangement("priority", kind) for kind in kinds)]
    return baselines + [Arrangement(order, kind) for order in orders for kind in kinds_of.get(order, ())]


def with_those_before(arrangements: Sequence[Arrangement]) -> list[Arrangement]:
    """The arrangements, and beside each of llmserve's the same of the checkout --before."""
    found = []
    for arrangement in arrangements:
        found.append(arrangement)
        if arrangement.way in ORDERS:
            found.append(replace(arrangement, before=True))
    return found


def baselines_of(arrangement: Arrangement, names: Sequence[str]) -> dict[str, str]:
    """label -> name of the arrangements, among `names`, with which this arrangement is compared."""
    baselines = {"direct": DIRECT.name} | {policy: Arrangement(policy).name for policy in ROUTER_POLICIES}
    if arrangement.predictions:
        baselines["priority"] = Arrangement("priority", arrangement.predictions).name
    baselines["before"] = replace(arrangement, before=True).name
    baselines["no bins"] = Arrangement("barrier").name
    return {label: name for label, name in baselines.items() if name in names and name != arrangement.name}
