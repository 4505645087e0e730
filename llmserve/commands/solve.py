"""Compute when a bin should wait and when it should release a batch.

The model is one queue with Poisson arrivals and an engine that serves batches. Prints a policy: the number of requests
to serve for each number of waiting requests. The policy has the least mean response time (ms) + energy weight x mean
power (W), or the least energy within a latency target. Also prints the policy's costs.

A batch of b takes SLOPE b + INTERCEPT ms and mJ, or the profile's times and energies; the default is SMDP-J's basic
scenario. With --service samples:FILE the values are per step, there is no default, and a batch takes as many steps as
its longest answer has tokens.
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
from rich.table import Table

from bins.average_cost import NotConverged, Policy, relative_value_iteration
from bins.curve import Curve
from bins.profile import PROFILES, Profile, resolve
from bins.service import Array, ServiceTimes
from bins.several_queues import Choice, least_energy, within_percentile
from bins.smdp import Evaluation, Queue
from bins.smdp_model import MS_PER_S
from llmserve.errors import ConfigError
from llmserve.runtime.extras import need_plot
from llmserve.settings.load import add_flags, convert
from llmserve.simulation import workload

BASIC = PROFILES["p4-googlenet"]
ONE_STEP = [1.0]  # steps of a request in BASIC
LOAD = 0.9  # default
KINDS = {
    "deterministic": ServiceTimes.deterministic,
    "erlang2": ServiceTimes.erlang,
    "exponential": ServiceTimes.exponential,
    "hyperexponential": ServiceTimes.hyperexponential,
}
SAMPLES = "samples:"
SERVICE_HELP = f"{' | '.join(KINDS)} | {SAMPLES}FILE[:COLUMN] (output lengths, one a line or CSV)"
LEVELS = (50, 90, 95, 99)
DRAWS = 200_000  # sampled response times for percentiles
GIB = 1 << 30
TRANSITIONS_BYTES_MAX = GIB  # size of the truncated model's transitions, which memory holds twice
EXCLUDED = {  # settings that each of these settings excludes
    "profile": ("latency_ms", "energy_mj"),
    "load": ("arrival_rate_per_s",),
    "latency_target_ms": ("energy_weight",),
}

Positive = Annotated[float, Meta(gt=0)]
Affine = tuple[float, float]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The problem to solve. None: a default or another field decides."""

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
            description="arrival rate over the capacity of batches of the best size, each as long as its longest "
            f"answer; must be below 1 (default {LOAD})"
        ),
    ] = None
    arrival_rate_per_s: Annotated[Positive | None, Meta(description="Poisson arrivals per second, instead of load")] = (
        None
    )
    energy_weight: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="cost of one watt, in milliseconds of mean response time (default 1)"),
    ] = None
    latency_target_ms: Annotated[
        Positive | None, Meta(description="least energy within this response time, instead of energy-weight")
    ] = None
    latency_target_percentile: Annotated[
        Annotated[float, Meta(gt=0, lt=100)] | None,
        Meta(description="percentile of the response times that the target limits (default: the mean)"),
    ] = None
    idle_power_w: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="power of the idle engine (default: the profile's, else 0)"),
    ] = None
    solver: Annotated[
        Literal["exact", "rvi"],
        Meta(
            description="exact: infinite queue, by policy iteration; rvi: SMDP-J's truncated queue, by value iteration"
        ),
    ] = "exact"
    s_max: Annotated[int, Meta(ge=1, le=5000, description="rvi: the last state before overflow")] = 70
    overflow_cost: Annotated[float, Meta(ge=0, description="rvi: ms per unit of time in overflow, c_o")] = 100.0
    epsilon: Annotated[float, Meta(gt=0, description="rvi: span at which the iteration ends, ms")] = 0.01
    seed: Annotated[int, Meta(ge=0, description="seed of the draws for percentiles")] = 0

    def check(self) -> None:
        """Raise ConfigError on settings that contradict each other."""
        for name, excluded in EXCLUDED.items():
            for other in excluded:
                if getattr(self, name) is not None and getattr(self, other) is not None:
                    raise ConfigError(f"{other} cannot be given with {name}, which decides it")
        if (self.latency_ms is None) != (self.energy_mj is None):
            present, other = ("latency_ms", "energy_mj") if self.energy_mj is None else ("energy_mj", "latency_ms")
            raise ConfigError(f"{present} needs {other}: the times and the energies of one engine")
        if self.is_basic and self.service.startswith(SAMPLES):
            raise ConfigError(f"service {SAMPLES}FILE needs profile, or latency_ms and energy_mj: the costs of a step")
        if self.batch_min > self.batch_max:
            raise ConfigError(f"batch_min: {self.batch_min} is more than batch_max, {self.batch_max}")
        if self.latency_target_percentile is not None and self.latency_target_ms is None:
            raise ConfigError("latency_target_percentile needs latency_target_ms")
        if self.latency_target_ms is not None and self.solver == "rvi":
            raise ConfigError("latency_target_ms: only the exact solver supports a latency target")
        if self.solver == "rvi":
            self._check_memory()

    def _check_memory(self) -> None:
        """Raise ConfigError when the truncated model's transition probabilities would take too much memory."""
        states, actions = self.s_max + 2, self.batch_max - self.batch_min + 2
        size = 8 * actions * states**2
        if size > TRANSITIONS_BYTES_MAX:
            raise ConfigError(
                f"s_max {self.s_max} with batch_max {self.batch_max}: the transitions of {states} states and {actions} "
                f"actions take {size / GIB:,.1f} GiB, of {TRANSITIONS_BYTES_MAX / GIB:g} GiB at most; --solver exact "
                "needs no s_max"
            )

    @property
    def is_basic(self) -> bool:
        """Whether times and energies are those of SMDP-J's basic scenario, the default."""
        return self.profile is None and self.latency_ms is None and self.energy_mj is None

    @property
    def weight(self) -> float:
        """The energy weight in ms/W, used without a latency target."""
        return 1.0 if self.energy_weight is None else self.energy_weight


class SolveReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The solution, as --json prints it.

    policy           (states,) requests to serve for each number of waiting requests, 0: wait; the last entry holds for
                     all larger numbers
    average_cost     ms: response_ms_mean + energy_weight * power_w_mean, of the infinite queue; None with a latency
                     target, as is energy_weight
    power_w_mean     None: the profile has no energy
    solve_ms         time of this solution, set-up included
    target_met, other_policy, share   only with a latency target; a share of the decisions follows other_policy
    response_ms_p50 ...               only with --percentiles
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
    """A policy, or a mix of two policies, in which `other` makes the fraction `share` of the decisions.

    evaluation : of the policy, or of the mix, in the infinite queue.
    values : (sizes + 1, states) ms s, of waiting and of each batch (Solution.values); None: not known.
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
    """Return the queue that a problem describes. lengths : in tokens, from --service samples:; None for other services.

    Raises ConfigError on an impossible queue, or on one whose engine cannot keep up.
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
    by_size_per_s = sizes / service.mean_s
    best = int(np.argmax(by_size_per_s))
    capacity_per_s = float(by_size_per_s[best])
    rate_per_s = problem.arrival_rate_per_s or (problem.load or LOAD) * capacity_per_s
    if rate_per_s >= capacity_per_s:
        raise ConfigError(
            f"{rate_per_s:,.6g} requests per second are too many, a load of {rate_per_s / capacity_per_s:.4g}: batches "
            f"of {sizes[best]} serve {capacity_per_s:,.6g} per second"
        )
    idle_power_w = profile.idle_w if problem.idle_power_w is None else problem.idle_power_w
    return Queue(rate_per_s, service, energy_j, idle_power_w)


def profile_of(problem: Problem) -> Profile:
    """Return the profile of a batch in which each request takes one step; with --service samples:, of one step.

    Raises ConfigError on a profile that cannot be read, or does not fit the problem.
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
            f"profile {profile.name}: a batch lasts as long as its longest answer: give --service {SAMPLES}FILE with "
            "the lengths of answers"
        )
    if not profile.energy_known and (problem.latency_target_ms is not None or problem.weight > 0):
        raise ConfigError(f"profile {profile.name} has no energy: give --energy-weight 0")
    return profile


def _curve(name: str, values: Affine) -> Curve:
    """Return a curve in s or J from values in ms or mJ. Raises ValueError, naming the field."""
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
    """Return the queue, the best decision, and a report.

    Raises ConfigError on an invalid problem, NotConverged when value iteration reaches its limit.
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
    evaluation, weighs = decision.evaluation, problem.latency_target_ms is None
    answer = SolveReport(
        policy=decision.policy.tolist(),
        average_cost=evaluation.cost_ms(problem.weight) if weighs else None,
        response_ms_mean=evaluation.response_s_mean * MS_PER_S,
        power_w_mean=evaluation.power_w_mean if profile.energy_known else None,
        batch_size_mean=evaluation.batch_size_mean,
        utilisation=evaluation.utilisation,
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
        return _within_target(queue, problem.latency_target_ms / MS_PER_S, problem.latency_target_percentile)
    if problem.solver == "rvi":
        return _by_value_iteration(queue, problem)
    solution = queue.solve(problem.weight)
    return Decision(solution.policy, solution.evaluation, solution.iterations, solution.values)


def _by_value_iteration(queue: Queue, problem: Problem) -> Decision:
    """SMDP-J's Algorithm 1 on its truncated model; the overflow state has no policy in the infinite queue (eq. 30)."""
    model = queue.truncated(problem.weight, states_max=problem.s_max, overflow_cost=problem.overflow_cost)
    solution = relative_value_iteration(model, epsilon=problem.epsilon)
    actions = np.concatenate([[0], queue.service.sizes])
    policy = actions[solution.policy[:-1]]
    try:
        return Decision(policy, queue.evaluate(policy), solution.iterations)
    except ValueError as error:
        raise ConfigError(
            f"with s_max {problem.s_max} and overflow_cost {problem.overflow_cost:g} the best policy lets the queue "
            "overflow; raise s_max or overflow_cost"
        ) from error


def _within_target(queue: Queue, target_s: float, level: float | None) -> Decision:
    """Return the policy of least energy whose mean response time, or percentile `level`, is within the target."""

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
    percentiles_ms = np.percentile(drawn_s, LEVELS) * MS_PER_S
    return {f"response_ms_p{level}": value for level, value in zip(LEVELS, percentiles_ms.tolist(), strict=True)}


# ---- the command ------------------------------------------------------------------------------------------------


# ---- the answer, printed and drawn --------------------------------------------------------------------------------

BLOCKS = " ▁▂▃▄▅▆▇█"
CHART_ROWS, CHART_MARGIN, AXIS_STEP = 4, 6, 8


def runs(policy: list[int]) -> list[tuple[str, str]]:
    """Return (states, action) of each run of states with the same kind of action; the last run is unbounded."""
    largest = policy[-1]
    starts: list[tuple[int, str]] = []
    for state, action in enumerate(policy):
        kind = "wait" if action == 0 else "all" if action == state else "full" if action == largest else "some"
        if not starts or starts[-1][1] != kind:
            starts.append((state, kind))
    ends = [state - 1 for state, _ in starts[1:]]
    rows = []
    for (first, kind), end in zip(starts, [*ends, None], strict=True):
        states = f"{first}+" if end is None else f"{first}" if end == first else f"{first}..{end}"
        served = policy[first : None if end is None else end + 1]
        counts = f"{min(served)}" if min(served) == max(served) else f"{min(served)} to {max(served)}"
        words = {"wait": "wait", "all": "serve all that wait", "full": f"serve {largest}", "some": f"serve {counts}"}
        rows.append((states, words[kind]))
    return rows


def chart(policy: list[int], width: int) -> list[str]:
    """Return a bar chart of the action by state, CHART_ROWS lines high, with an axis; cut to `width` characters.

    A bar is blank only where no request is served.
    """
    shown = _shown_states(policy)
    count = min(shown, width - CHART_MARGIN)
    full = CHART_ROWS * (len(BLOCKS) - 1)
    levels = [max(round(action / max(policy) * full), int(action > 0)) for action in policy[:count]]
    lines = []
    for row in reversed(range(CHART_ROWS)):
        bars = "".join(BLOCKS[min(max(level - row * (len(BLOCKS) - 1), 0), len(BLOCKS) - 1)] for level in levels)
        label = f"{max(policy)}" if row == CHART_ROWS - 1 else "0" if row == 0 else ""
        lines.append(f"{label:>{CHART_MARGIN - 2}} {bars}".rstrip())
    ticks = "".join(f"{state:<{AXIS_STEP}}" for state in range(0, count, AXIS_STEP))
    lines.append(" " * (CHART_MARGIN - 1) + ticks.rstrip())
    return lines if count == shown else [*lines, f"cut: ends at {shown - 1}"]


def _shown_states(policy: list[int]) -> int:
    """Return how many states to show: a few more than until the policy becomes constant."""
    return min(policy.index(policy[-1]) + AXIS_STEP + 1, len(policy))


def print_answer(problem: Problem, answer: SolveReport, console: Console) -> None:
    console.print(_title(problem, answer), highlight=False)
    policies = [("", answer.policy)]
    if answer.other_policy is not None and answer.share is not None:
        policies = [
            (f"in {1 - answer.share:.1%} of the decisions", answer.policy),
            (f"in the other {answer.share:.1%}", answer.other_policy),
        ]
    for heading, policy in policies:
        table = Table("waiting", "do", title=heading or None, title_justify="left")
        for states, action in runs(policy):
            table.add_row(states, action)
        console.print(table)
        for line in chart(policy, console.width):
            console.print(line, highlight=False, markup=False)
    totals = Table(show_header=False)
    totals.add_column()
    totals.add_column(justify="right")
    for label, text in _totals(answer):
        totals.add_row(label, text)
    console.print(totals)


def _title(problem: Problem, answer: SolveReport) -> str:
    rate, weight = f"{answer.arrival_rate_per_s:,.6g} requests/s", f"energy weight {problem.weight:g} ms/W"
    if problem.latency_target_ms is not None:
        level = problem.latency_target_percentile
        statistic = "mean" if level is None else f"p{level:g}"
        missed = "" if answer.target_met else ": the target cannot be met, this is the fastest policy"
        weight = f"least energy with {statistic} response time <= {problem.latency_target_ms:g} ms{missed}"
    batches = f"{problem.service} batches of {problem.batch_min} to {problem.batch_max}"
    if problem.is_basic:
        batches += " with the times and energies of SMDP-J's basic scenario"
    elif problem.profile is not None:
        batches += f" with the times and energies of {problem.profile}"
    return f"{batches}, load {answer.load:.4g} ({rate}), {weight}, solver {answer.solver}"


def _totals(answer: SolveReport) -> list[tuple[str, str]]:
    """Return (label, value) rows of the known totals."""
    rows = [
        ("average cost (ms)", answer.average_cost, ".4f"),
        ("mean response time (ms)", answer.response_ms_mean, ".4f"),
        ("mean power (W)", answer.power_w_mean, ".4f"),
        ("mean batch", answer.batch_size_mean, ".2f"),
        ("utilisation", answer.utilisation, ".1%"),
        *((f"response time p{level} (ms)", getattr(answer, f"response_ms_p{level}"), ".3f") for level in LEVELS),
        ("iterations", answer.iterations, ","),
        ("solved in (ms)", answer.solve_ms, ".1f"),
    ]
    return [(label, format(value, form)) for label, value, form in rows if value is not None]


def plot(queue: Queue, decision: Decision, path: Path) -> None:
    """Draw the policy and, if known, the extra cost of waiting, or of serving, over the better action.

    Raises ConfigError on a path that cannot be written or has no known picture format.
    """
    from matplotlib.figure import Figure

    panels = 1 if decision.values is None else 2
    figure = Figure(figsize=(7, 3.2 * panels), layout="constrained")
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    states = np.arange(_shown_states(decision.policy.tolist()))
    axes[0].plot(states, np.minimum(states, queue.service.sizes[-1]), color="0.8", label="all waiting")
    axes[0].step(states, decision.policy[: states.size], where="mid", label="policy")
    if decision.other is not None:
        axes[0].step(states, decision.other[: states.size], where="mid", label=f"in {decision.share:.1%} of decisions")
    axes[0].set_ylabel("requests to serve")
    axes[0].legend()
    if decision.values is not None:
        wait, serve = decision.values[0, : states.size], decision.values[1:, : states.size].min(axis=0)
        axes[1].plot(states, wait - np.minimum(wait, serve), label="to wait")
        axes[1].plot(states, serve - np.minimum(wait, serve), label="to serve")
        axes[1].set_ylabel("extra cost (ms s)")
        axes[1].legend()
    axes[-1].set_xlabel("waiting requests")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: cannot draw {path}: {error}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, Problem, "problem")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--percentiles", action="store_true", help="print percentiles of the response time, by sampling"
    )
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the policy and the costs behind it")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def main(args: argparse.Namespace) -> int:
    need_plot(args.plot)
    flags = vars(args)
    problem = convert(Problem, {name: flags[name] for name in Problem.__struct_fields__ if name in flags})
    try:
        queue, decision, answer = solve(problem, percentiles=args.percentiles)
    except NotConverged as error:
        hint = "; try a larger --epsilon or --overflow-cost, or --solver exact" if problem.solver == "rvi" else ""
        print(f"llmserve: {error}{hint}", file=sys.stderr)
        return 1
    misfit = profile_of(problem).misfit
    if misfit:
        print(f"llmserve: profile {problem.profile}: {misfit}", file=sys.stderr)
    if args.json:
        print(msgspec.json.encode(answer).decode())
    else:
        print_answer(problem, answer, Console())
    if args.plot is not None:  # last, so that the solution is printed even if drawing fails
        plot(queue, decision, args.plot)
    return 0
