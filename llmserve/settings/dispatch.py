"""The section [dispatch], and the solvers that make plans from these settings."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from bins.dispatch import DispatchSolver, Objective
from bins.profile import PROFILES, Profile, resolve
from llmserve.settings.by_model import by_model
from llmserve.settings.policies import PLANNED, SchedulingConfig

OBJECTIVES = {  # objectives of plans, and the releases in which each has an effect
    "energy_weight": ("table",),
    "latency_target_s": ("table", "deadline"),
    "latency_target_percentile": ("table",),
}


class DispatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Costs and savings of waiting; for the releases rate-headroom, deadline and table"""

    profile: Annotated[
        tuple[str, ...],
        Meta(
            description="duration and energy of a batch: a file of `llmserve profile`, or a built-in profile. The "
            "built-in profiles are "
            + ", ".join(sorted(PROFILES))
            + ". Energy in /metrics and orders with deadlines use the profile, too. The prefix model:ID= limits the "
            "profile to one model; repeat for several",
            extra={"metavar": "[model:ID=]PROFILE"},
        ),
    ] = ()
    energy_weight: Annotated[
        float,
        Meta(ge=0, description="under --release table: cost of one watt, in milliseconds of mean response time"),
    ] = 0.0
    latency_target_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="under --release table: limit of the mean response time, reached with the least energy; "
            "replaces the weight. Under --release deadline: the deadline of requests without an earlier one"
        ),
    ] = None
    latency_target_percentile: Annotated[
        Annotated[float, Meta(ge=50, lt=100)] | None,
        Meta(description="percentile of the response times to which the target applies (default: the mean)"),
    ] = None

    def profiles(self) -> dict[str, Profile]:
        """Return the profiles by model; "": for every other model. Raises ValueError on an unreadable profile."""
        return {model: resolve(profile) for model, profile in by_model("profile", self.profile).items()}

    def solver(self, scheduling: SchedulingConfig, *, barrier: bool) -> DispatchSolver | None:
        """Return the solver of the models without their own profile; see `solvers`."""
        return self.solvers(scheduling, barrier=barrier).get("")

    def solvers(self, scheduling: SchedulingConfig, *, barrier: bool) -> dict[str, DispatchSolver]:
        """Return the solvers of a resolved configuration, by model ("": every other model); {} if its release follows
        no plan.

        Raises ValueError on an unreadable profile, on settings that contradict each other, and on settings without
        effect in the release.
        """
        assert scheduling.release is not None, "resolve the configuration first"
        self._check(scheduling.release, barrier)
        if scheduling.release not in PLANNED:
            return {}
        if not self.profile:
            raise ValueError(
                f"release {scheduling.release} needs --profile, the duration of batches: measure a profile with "
                "llmserve profile"
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
        """Raise ValueError on objectives without effect, or on two objectives that contradict each other."""
        for name, users in OBJECTIVES.items():
            if getattr(self, name) and release not in users:
                raise ValueError(f"{name} has no effect under release {release}, only under {' and '.join(users)}")
        if self.latency_target_s is not None and self.energy_weight:
            raise ValueError("give either an energy weight or a latency target, not both")
        if self.latency_target_percentile is not None and self.latency_target_s is None:
            raise ValueError("latency_target_percentile has no effect without latency_target_s")
        if self.latency_target_percentile is not None and not barrier:
            raise ValueError("latency_target_percentile: plans for refill engines can only limit the mean")

    def _check_energy(self, engine: Profile) -> None:
        """Raise ValueError when a setting saves energy but the profile has no energy."""
        for name in ("energy_weight", "latency_target_s"):
            if getattr(self, name) and not engine.energy_known:
                raise ValueError(f"{name}: the profile {engine.name} has no energy, which release table needs")
