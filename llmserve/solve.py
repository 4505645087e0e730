"""Solve: when a bin should wait and when it should go.

One queue, Poisson arrivals, an engine that serves batches. Prints how many requests to serve by how many wait, of all
policies the one of least mean response time (ms) + energy weight x mean power (W), or of least energy within a latency
target; and what it comes to.

A batch of b takes SLOPE b + INTERCEPT ms and mJ, or what its profile says; where nothing is said, what it takes in
SMDP-J's basic scenario. With --service samples:FILE these are per step, there is no default, and a batch lasts as many
steps as its longest answer has tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from rich.console import Console

from bins.average_cost import NotConverged, Policy, relative_value_iteration
from bins.curve import Curve
from bins.profile import PROFILES, Profile, resolve
from bins.service import Array, ServiceTimes
from bins.several_queues import Choice, least_energy, within_percentile
from bins.smdp import Evaluation, Queue
from bins.smdp_model import MS_PER_S
from llmserve.config import add_flags, convert
from llmserve.errors import ConfigError
from llmserve.extras import need_plot
from llmserve.simulation import workload

BASIC = PROFILES["p4-googlenet"]
ONE_STEP = [1.0]  # what a request takes there
LOAD = 0.9  # where nothing is said
KINDS = {
    "deterministic": ServiceTimes.deterministic,
    "erlang2": ServiceTimes.erlang,
    "exponential": ServiceTimes.exponential,
    "hyperexponential": ServiceTimes.hyperexponential,
}
SAMPLES = "samples:"
SERVICE_HELP = f"{' | '.join(KINDS)} | {SAMPLES}FILE[:COLUMN] (output lengths, one a line or CSV)"
LEVELS = (50, 90, 95, 99)
DRAWS = 200_000  # response times that percentiles are taken of
GIB = 1 << 30
TRANSITIONS_BYTES_MAX = GIB  # of the truncated model, which is held twice
EXCLUDED = {  # what each of these leaves no room for
    "profile": ("latency_ms", "energy_mj"),
    "load": ("arrival_rate_per_s",),
    "latency_target_ms": ("energy_weight",),
}

Positive = Annotated[float, Meta(gt=0)]
Affine = tuple[float, float]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What is solved. None where a default or another field decides."""

    service: Annotated[str, Meta(description=f"distribution of a batch's time: {SERVICE_HELP}")] = "deterministic"
    latency_ms: Annotated[
        Affine | None,
        Meta(description="SLOPE,INTERCEPT of a batch's mean time, by its size; with energy-mj (default 0.3051,1.0524)"),
    ] = None
    energy_mj: Annotated[
        Affine | None,
        Meta(description="SLOPE,INTERCEPT of a batch's energy, by its size; with latency-ms (default 19.899,19.603)"),
    ] = None
    profile: Annotated[
        str | None,
        Meta(description=f"{', '.join(PROFILES)}, or a file; instead of latency-ms and energy-mj"),
    ] = None
    batch_min: Annotated[int, Meta(ge=1, description="smallest batch")] = 1
    batch_max: Annotated[int, Meta(ge=1, le=4096, description="largest batch")] = 32
    load: Annotated[
        Positive | None,
        Meta(
            description="arrivals over what batches of the largest size serve; 1 is all that full batches of the one "
            f"bin serve, each as long as its longest answer, and must not be reached (default {LOAD})"
        ),
    ] = None
    arrival_rate_per_s: Annotated[Positive | None, Meta(description="Poisson arrivals a second, instead of load")] = (
        None
    )
    energy_weight: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="milliseconds of mean response time that one watt is worth (default 1)"),
    ] = None
    latency_target_ms: Annotated[
        Positive | None, Meta(description="least energy within this response time, instead of energy-weight")
    ] = None
    latency_target_percentile: Annotated[
        Annotated[float, Meta(gt=0, lt=100)] | None,
        Meta(description="of the response times, that the target is for (default: the target is for their mean)"),
    ] = None
    idle_power_w: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="what the engine draws while nothing runs (default: the profile's, else 0)"),
    ] = None
    solver: Annotated[
        Literal["exact", "rvi"],
        Meta(description="exact: the infinite queue, by policy iteration; rvi: SMDP-J's truncated one, by values"),
    ] = "exact"
    s_max: Annotated[int, Meta(ge=1, le=5000, description="rvi: the last state before overflow")] = 70
    overflow_cost: Annotated[float, Meta(ge=0, description="rvi: ms a unit of time in overflow, c_o")] = 100.0
    epsilon: Annotated[float, Meta(gt=0, description="rvi: span at which it ends, ms")] = 0.01
    seed: Annotated[int, Meta(ge=0, description="of the draws that percentiles are taken of")] = 0

    def check(self) -> None:
        """Raises ConfigError on settings that contradict each other."""
        for name, others in EXCLUDED.items():
            for other in others:
                if getattr(self, name) is not None and getattr(self, other) is not None:
                    raise ConfigError(f"{other} cannot be given with {name}, which decides it")
        if (self.latency_ms is None) != (self.energy_mj is None):
            given, other = ("latency_ms", "energy_mj") if self.energy_mj is None else ("energy_mj", "latency_ms")
            raise ConfigError(f"{given} needs {other}: the times and the energies of one engine")
        if self.is_basic and self.service.startswith(SAMPLES):
            raise ConfigError(f"service {SAMPLES}FILE needs profile, or latency_ms and energy_mj: what a step takes")
        if self.batch_min > self.batch_max:
            raise ConfigError(f"batch_min: {self.batch_min} is more than batch_max, {self.batch_max}")
        if self.latency_target_percentile is not None and self.latency_target_ms is None:
            raise ConfigError("latency_target_percentile: there is no latency_target_ms")
        if self.latency_target_ms is not None and self.solver == "rvi":
            raise ConfigError("latency_target_ms: only the exact solver looks for it")
        if self.solver == "rvi":
            self._check_memory()

    def _check_memory(self) -> None:
        """Raises ConfigError when the truncated model has more transition probabilities than memory should hold."""
        states, actions = self.s_max + 2, self.batch_max - self.batch_min + 2
        size = 8 * actions * states**2
        if size > TRANSITIONS_BYTES_MAX:
            raise ConfigError(
                f"s_max {self.s_max} with batch_max {self.batch_max}: the transitions of {states} states and {actions} "
                f"actions take {size / GIB:,.1f} GiB, of {TRANSITIONS_BYTES_MAX / GIB:g} at most; --solver exact needs "
                "no s_max"
            )

    @property
    def is_basic(self) -> bool:
        """Whether times and energies are SMDP-J's, because none are given."""
        return self.profile is None and self.latency_ms is None and self.energy_mj is None

    @property
    def weight(self) -> float:
        """ms a watt, where no latency target decides."""
        return 1.0 if self.energy_weight is None else self.energy_weight


class SolveReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found, as --json prints it.

    policy           (states,) requests to serve by how many wait, 0: wait; with more, as the last
    average_cost     ms: response_ms_mean + energy_weight * power_w_mean, of the infinite queue; with a latency target,
                     which weighs nothing, this and energy_weight are None
    power_w_mean     None: the profile has no energy
    solve_ms         of this one solution, set-up included
    target_met, other_policy, share   with a latency target; the decisions of that share follow the other policy
    response_ms_p50 ...               when asked for
    """

    policy: list[int]
    average_cost: float | None
    response_ms_mean: float
    power_w_mean: float | None
    batch_size_mean: float
    utilisation: float
    iterations: int
    solve_ms: float
    solver: str
    load: float
    arrival_rate_per_s: float
    energy_weight: float | None
    target_met: bool | None = None
    other_policy: list[int] | None = None
    share: float | None = None
    response_ms_p50: float | None = None
    response_ms_p90: float | None = None
    response_ms_p95: float | None = None
    response_ms_p99: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy; or two, of which `other` has that share of the decisions.

    evaluation : of it, or of both mixed, in the infinite queue.
    values : (sizes + 1, states) ms s, of waiting and of each batch (Solution.values); None: the solver gives none.
    """

    policy: Policy
    evaluation: Evaluation
    iterations: int
    values: Array | None = None
    other: Policy | None = None
    share: float = 0.0
    target_met: bool | None = None


# ---- the queue --------------------------------------------------------------------------------------------------


def queue_of(problem: Problem, profile: Profile, lengths: Array | None) -> Queue:
    """The queue that a problem describes. lengths : what --service samples: names, tokens; None with other services.

    Raises ConfigError on one that cannot be, or cannot keep up.
    """
    sizes = np.arange(problem.batch_min, problem.batch_max + 1)
    try:
        answers = ONE_STEP if lengths is None else lengths
        energy_j = profile.energy_j([answers], sizes)[0]
        if lengths is None:
            service = KINDS[problem.service](profile.latency_s([answers], sizes)[0], problem.batch_min)
        else:
            service = ServiceTimes.longest_of(
                lengths, profile.step_s.at(sizes), batch_min=problem.batch_min, prefill_s=profile.prefill_s
            )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    capacity_per_s = problem.batch_max / float(service.mean_s[-1])
    rate_per_s = problem.arrival_rate_per_s or (problem.load or LOAD) * capacity_per_s
    if rate_per_s >= capacity_per_s:
        raise ConfigError(
            f"{rate_per_s:,.6g} requests a second are too many, a load of {rate_per_s / capacity_per_s:.4g}: batches "
            f"of {problem.batch_max} serve {capacity_per_s:,.6g} a second"
        )
    idle_power_w = profile.idle_w if problem.idle_power_w is None else problem.idle_power_w
    return Queue(rate_per_s, service, energy_j, idle_power_w)


def profile_of(problem: Problem) -> Profile:
    """Of a batch where each request is one step, or of a step of the answers' samples.

    Raises ConfigError on one that cannot be read, or does not suit the problem.
    """
    try:
        if problem.profile is None:
            return Profile(
                name="asked for",
                step_s=BASIC.step_s if problem.latency_ms is None else _curve("latency_ms", problem.latency_ms),
                step_j=BASIC.step_j if problem.energy_mj is None else _curve("energy_mj", problem.energy_mj),
                idle_w=0.0,
                source="the command line",
                energy_source="modelled",
            )
        profile = resolve(problem.profile)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if profile.name != BASIC.name and not problem.service.startswith(SAMPLES):
        raise ConfigError(
            f"profile {profile.name}: a batch lasts as its longest answer; --service {SAMPLES}FILE says how long"
        )
    if not profile.energy_known and (problem.latency_target_ms is not None or problem.weight > 0):
        raise ConfigError(f"profile {profile.name} has no energy: only --energy-weight 0 makes sense of it")
    return profile


def _curve(name: str, values: Affine) -> Curve:
    """From milliseconds or millijoules. Raises ValueError naming the field."""
    slope, intercept = values
    try:
        return Curve.affine(slope / 1e3, intercept / 1e3)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _lengths(service: str) -> Array | None:
    if service.startswith(SAMPLES):
        return workload.read_lengths(service.removeprefix(SAMPLES))
    if service not in KINDS:
        raise ConfigError(f"service {service!r} is not one of {SERVICE_HELP}")
    return None


# ---- the solution -----------------------------------------------------------------------------------------------


def solve(problem: Problem, *, percentiles: bool = False) -> tuple[Queue, Decision, SolveReport]:
    """The queue, what to do in it, and what that comes to.

    Raises ConfigError on a problem that makes no sense, NotConverged when value iteration reaches its cap.
    """
    problem.check()
    lengths = _lengths(problem.service)
    began_s = time.perf_counter()
    profile = profile_of(problem)
    queue = queue_of(problem, profile, lengths)
    try:
        decision = _decide(queue, problem)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    solve_ms = (time.perf_counter() - began_s) * 1e3
    found, weighs = decision.evaluation, problem.latency_target_ms is None
    answer = SolveReport(
        policy=decision.policy.tolist(),
        average_cost=found.cost_ms(problem.weight) if weighs else None,
        response_ms_mean=found.response_s_mean * MS_PER_S,
        power_w_mean=found.power_w_mean if profile.energy_known else None,
        batch_size_mean=found.batch_size_mean,
        utilisation=found.utilisation,
        iterations=decision.iterations,
        solve_ms=solve_ms,
        solver=problem.solver,
        load=queue.load,
        arrival_rate_per_s=float(queue.arrival_rate_per_s),
        energy_weight=problem.weight if weighs else None,
        target_met=decision.target_met,
        other_policy=None if decision.other is None else decision.other.tolist(),
        share=None if decision.other is None else decision.share,
    )
    if percentiles:
        answer = msgspec.structs.replace(answer, **_percentiles(queue, decision, problem.seed))
    return queue, decision, answer


def _decide(queue: Queue, problem: Problem) -> Decision:
    if problem.latency_target_ms is not None:
        return _within(queue, problem.latency_target_ms / MS_PER_S, problem.latency_target_percentile)
    if problem.solver == "rvi":
        return _by_values(queue, problem)
    found = queue.solve(problem.weight)
    return Decision(found.policy, found.evaluation, found.iterations, found.values)


def _by_values(queue: Queue, problem: Problem) -> Decision:
    """SMDP-J's Algorithm 1 on its truncated model; the overflow state has no policy in the infinite queue (eq. 30)."""
    model = queue.truncated(problem.weight, states_max=problem.s_max, overflow_cost=problem.overflow_cost)
    found = relative_value_iteration(model, epsilon=problem.epsilon)
    actions = np.concatenate([[0], queue.service.sizes])
    policy = actions[found.policy[:-1]]
    try:
        return Decision(policy, queue.evaluate(policy), found.iterations)
    except ValueError as error:
        raise ConfigError(
            f"with s_max {problem.s_max} and overflow_cost {problem.overflow_cost:g} it is best to let the queue "
            "overflow; raise one of them"
        ) from error


def _within(queue: Queue, target_s: float, level: float | None) -> Decision:
    """The policy of least energy whose mean response time, or that percentile of it, is within the target."""

    def choose(response_s_max: float) -> tuple[Choice, list[Queue]]:
        return least_energy([queue], response_s_max), [queue]

    choice, _ = choose(target_s) if level is None else within_percentile(choose, target_s, level)
    fast = choice.solutions[0]
    if not choice.others:
        return Decision(fast.policy, fast.evaluation, fast.iterations, fast.values, target_met=choice.target_met)
    other = choice.others[0].policy
    evaluation = queue.evaluate(fast.policy, other, choice.share)
    return Decision(fast.policy, evaluation, fast.iterations, fast.values, other, choice.share, choice.target_met)


def _percentiles(queue: Queue, decision: Decision, seed: int) -> dict[str, float]:
    drawn_s = queue.draw_responses(decision.policy, DRAWS, np.random.default_rng(seed), decision.other, decision.share)
    found_ms = np.percentile(drawn_s, LEVELS) * MS_PER_S
    return {f"response_ms_p{level}": value for level, value in zip(LEVELS, found_ms.tolist(), strict=True)}


# ---- the command ------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Problem, "problem")
    output = parser.add_argument_group("output")
    output.add_argument("--percentiles", action="store_true", help="of the response time, by sampling the model")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the policy and the costs it is made of")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def main(args: argparse.Namespace) -> int:
    from llmserve import solve_report

    need_plot(args.plot)
    given = vars(args)
    problem = convert(Problem, {name: given[name] for name in Problem.__struct_fields__ if name in given})
    try:
        queue, decision, answer = solve(problem, percentiles=args.percentiles)
    except NotConverged as error:
        hint = "; a larger --epsilon or --overflow-cost, or --solver exact, ends" if problem.solver == "rvi" else ""
        print(f"llmserve: {error}{hint}", file=sys.stderr)
        return 1
    if args.json:
        print(msgspec.json.encode(answer).decode())
    else:
        solve_report.print_answer(problem, answer, Console())
    if args.plot is not None:  # last: what was solved is told even if it cannot be drawn
        solve_report.plot(queue, decision, args.plot)
    return 0
