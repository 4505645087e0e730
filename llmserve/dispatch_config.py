"""The settings of dispatching by latency and energy, and who makes plans by them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from bins.dispatch import DispatchSolver, Objective
from bins.profile import PROFILES, Profile, resolve
from llmserve.by_model import by_model
from llmserve.policies import PLANNED, SchedulingConfig

OBJECTIVES = {  # what may be asked of plans, and the releases under which it is of use
    "energy_weight": ("table",),
    "latency_target_s": ("table", "deadline"),
    "latency_target_percentile": ("table",),
}


class DispatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What waiting may cost and save; for the releases rate-headroom, deadline and table"""

    profile: Annotated[
        tuple[str, ...],
        Meta(
            description="what a batch takes, in seconds and joules: a file of `llmserve profile`, or a built-in one. "
            "Built in are "
            + ", ".join(sorted(PROFILES))
            + ". Energy in /metrics and orders that go by deadlines use it, too. With model:ID= before it, of this "
            "model; repeat for several",
            extra={"metavar": "[model:ID=]PROFILE"},
        ),
    ] = ()
    energy_weight: Annotated[
        float,
        Meta(ge=0, description="under --release table: milliseconds of mean response time that one watt is worth"),
    ] = 0.0
    latency_target_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="under --release table: least energy with mean response times within this. Instead of a "
            "weight; under deadline: the deadline of requests without an earlier one"
        ),
    ] = None
    latency_target_percentile: Annotated[
        Annotated[float, Meta(ge=50, lt=100)] | None,
        Meta(description="of the response times, which the target is for (default: their mean)"),
    ] = None

    def profiles(self) -> dict[str, Profile]:
        """By model; "": of every other model. Raises ValueError on one that cannot be read."""
        return {model: resolve(profile) for model, profile in by_model("profile", self.profile).items()}

    def solver(self, scheduling: SchedulingConfig, *, barrier: bool) -> DispatchSolver | None:
        """Who makes plans for every model that has no profile of its own; see `solvers`."""
        return self.solvers(scheduling, barrier=barrier).get("")

    def solvers(self, scheduling: SchedulingConfig, *, barrier: bool) -> dict[str, DispatchSolver]:
        """Who makes plans for a resolved configuration, by model ("": of every other); {} where its release follows
        none.

        Raises ValueError on a profile that cannot be read, on settings that contradict each other, and on those that
        the release has no use for.
        """
        assert scheduling.release is not None, "resolve the configuration first"
        self._check(scheduling.release, barrier)
        if scheduling.release not in PLANNED:
            return {}
        if not self.profile:
            raise ValueError(
                f"release {scheduling.release} needs --profile, what a batch takes: measure one with "
                "scripts/profile_engine.py"
            )
        profiles = self.profiles()
        merges = scheduling.release == "table"
        if merges:
            for profile in profiles.values():
                self._check_energy(profile)
        objective = Objective(self.energy_weight, self.latency_target_s, self.latency_target_percentile)
        return {
            model: DispatchSolver(profile, scheduling.full_batch, objective, barrier=barrier, merges=merges)
            for model, profile in profiles.items()
        }

    def _check(self, release: str, barrier: bool) -> None:
        """Raises ValueError."""
        for name, users in OBJECTIVES.items():
            if getattr(self, name) and release not in users:
                raise ValueError(f"{name} is of no use under release {release}, only under {' and '.join(users)}")
        if self.latency_target_s is not None and self.energy_weight:
            raise ValueError("either an energy weight or a latency target, not both")
        if self.latency_target_percentile is not None and self.latency_target_s is None:
            raise ValueError("latency_target_percentile is of no use without latency_target_s")
        if self.latency_target_percentile is not None and not barrier:
            raise ValueError("latency_target_percentile: of engines whose slots refill only the mean can be planned")

    def _check_energy(self, engine: Profile) -> None:
        """Raises ValueError when energy is to be saved of which the profile knows nothing."""
        for name in ("energy_weight", "latency_target_s"):
            if getattr(self, name) and not engine.energy_known:
                raise ValueError(f"{name}: the profile {engine.name} has no energy, which release table would save")
