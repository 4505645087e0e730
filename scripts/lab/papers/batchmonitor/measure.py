"""BatchMonitor and BatchDispatcher (Khan, Yu, Kim, Seo): the paper's comparison, with llmserve's own scheduler.

The request rate climbs from 1 to 240 a second in 300 s; one engine serves one model in static batches. The paper does
not print the time and energy of a batch, the GPU, the deadline and the largest batch: this module has assumptions.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bins import profile as profiles
from bins.profile import Profile
from bins.service import ServiceTimes
from bins.smdp import Evaluation, Queue
from llmserve.commands.simulate import Scenario, simulate
from llmserve.commands.simulate import run as run_workload
from llmserve.settings.dispatch import DispatchConfig
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.report import Recorder, Summary
from llmserve.simulation.scenario import prepare
from papers.batchmonitor.printed_rate import PrintedScheduling
from papers.rows import HOLDS, Case, Report, Row, Rows, claim, in_parts

FIGURE, CONSTANT = "Fig. 2", "Constant load"
PRINTED = "rate"  # the release as printed
BASIC = "p4-googlenet"  # the profile of SMDP-J's basic scenario
RATE_FIRST, RATE_LAST, RAMP_S = 1.0, 240.0, 300.0  # of the paper's evaluation; assumed: the rate climbs evenly
BATCH_MAX = 32  # assumed
DEADLINE_S = 0.2  # assumed, for the largest batch within a deadline
WAIT_S = 0.05  # longest wait for more requests under the repaired rule
CONSTANT_LOAD = 0.7
CONSTANT_RELEASES = ("greedy", "static:8", PRINTED, "rate-headroom")
ENERGY_WEIGHT = 0.1  # ms/W, of the SMDP table: a watt is worth a tenth of a millisecond
CALIBRATED = 0.1  # tolerance of numbers that the assumed profiles were chosen for

# ResNet-50 on a V100 (16 GB), mixed precision: mean latency in ms of batches of 1, 2, 4, 8, 16, 32, published by NVIDIA
# (DeepLearningExamples, PyTorch, ResNet50 v1.5). 250 W is the card's limit, and 40 W approximately its idle power.
V100_SIZES, V100_MS = (1, 2, 4, 8, 16, 32), (12.78, 13.01, 13.41, 13.65, 14.0, 15.84)
V100_BUSY_W, V100_IDLE_W = 250.0, 40.0

# The paper does not name its GPU. Assumed: 6e13 multiply-accumulates a second, which gives a batch's slope; and
# intercepts and powers with which the rule as printed comes near the printed latencies and the printed range of
# requests per joule. The intercepts of the convolutional nets came out about proportional to their layers.
MULTIPLY_ACCUMULATES_PER_S = 6e13
ASSUMED_BUSY_W, ASSUMED_IDLE_W = 360.0, 95.0


@dataclass(frozen=True, slots=True)
class Model:
    """gmacs : multiply-accumulates of a request, 1e9.  intercept_ms : of a batch.  latency_ms : published."""

    gmacs: float
    intercept_ms: float
    latency_ms: float

    @property
    def slope_ms(self) -> float:
        return 1e12 * self.gmacs / MULTIPLY_ACCUMULATES_PER_S


MODELS = {
    "BERT-base": Model(35.0, 14.5, 45.78),  # of 384 tokens
    "VGG19": Model(19.6, 1.2, 6.11),
    "ResNet50": Model(4.1, 2.9, 7.29),
    "ResNet101": Model(7.8, 4.6, 9.67),
}
V100 = "ResNet50 on V100"
EFFICIENCY_LEAST, EFFICIENCY_MOST = 0.46, 0.97  # requests per joule, over the four models
SMDP_IS_BETTER = "SMDP has less latency than rate and more requests per joule"
CLOSE = "rate is almost as fast as ad hoc (within a tenth)"
GAIN_OVER_AD_HOC, TIMES_BELOW_LARGEST = 5.0, 14.0  # per cent "up to"; of the latencies


@dataclass(frozen=True, slots=True)
class Rule:
    """A release rule. release : one of llmserve's, or PRINTED.  dispatch, wait_s : settings other than the defaults"""

    release: str
    dispatch: DispatchConfig | None = None
    wait_s: float | None = None

    @property
    def scheduling(self) -> SchedulingConfig:
        if self.release == PRINTED:
            return PrintedScheduling(batch_size=BATCH_MAX, bins=1)
        return SchedulingConfig(release=self.release, batch_size=BATCH_MAX, bins=1, batch_wait_s=self.wait_s)


RULES: Mapping[str, Rule] = {
    "ad hoc": Rule("greedy"),
    "largest batch": Rule("deadline", DispatchConfig(latency_target_s=DEADLINE_S)),
    "rate": Rule(PRINTED, DispatchConfig()),
    "rate repaired": Rule("rate-headroom", DispatchConfig(), WAIT_S),
    "smdp": Rule("table", DispatchConfig(energy_weight=ENERGY_WEIGHT)),
}


def modelled(name: str, step_s: profiles.Curve, busy_w: float, idle_w: float, source: str) -> Profile:
    """Return a profile whose energy is its time, times a constant power."""
    return Profile(
        name, step_s, step_s.times(busy_w), idle_w, slots_max=BATCH_MAX, source=source, energy_source="modelled"
    )


def engine_profiles() -> dict[str, Profile]:
    """Return the four assumed profiles and the published profile, by model."""
    by_model = {
        name: modelled(
            name,
            profiles.Curve.affine(model.slope_ms / 1e3, model.intercept_ms / 1e3),
            ASSUMED_BUSY_W,
            ASSUMED_IDLE_W,
            "assumed: the BatchMonitor paper gives no times",
        )
        for name, model in MODELS.items()
    }
    published = profiles.Curve.fit(V100_SIZES, np.array(V100_MS) / 1e3)
    by_model[V100] = modelled(V100, published, V100_BUSY_W, V100_IDLE_W, "NVIDIA DeepLearningExamples, ResNet50 v1.5")
    return by_model


def ramp(rng: np.random.Generator, seconds: float) -> NDArray[np.float64]:
    """Draw Poisson arrivals, in seconds, whose rate climbs evenly from RATE_FIRST to RATE_LAST.

    By inversion: between two arrivals, the expected count up to t,
    RATE_FIRST t + (RATE_LAST - RATE_FIRST) t^2 / (2 seconds), grows by an exponential variable of mean 1.
    """
    expected = (RATE_FIRST + RATE_LAST) / 2 * seconds
    counts = np.cumsum(rng.exponential(1.0, int(expected + 10 * math.sqrt(expected) + 10)))
    growth = (RATE_LAST - RATE_FIRST) / seconds
    times_s = (np.sqrt(RATE_FIRST**2 + 2 * growth * counts) - RATE_FIRST) / growth
    return times_s[times_s < seconds]


def write_trace(path: Path, arrivals_s: NDArray[np.float64]) -> None:
    lines = [f"{at_s:.9f},0,1\n" for at_s in arrivals_s]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(lines))


@dataclass(frozen=True, slots=True)
class Effort:
    seed: int
    runs: int = 3
    seconds: float = RAMP_S
    models: tuple[str, ...] = (*MODELS, V100)
    constant_runs: int = 5
    warm_up_s: float = 40.0
    constant_s: float = 60.0

    @classmethod
    def quick(cls, seed: int) -> Effort:
        return cls(seed, 2, 20.0, ("ResNet50",), constant_runs=2, warm_up_s=0.5, constant_s=3.0)

    @property
    def ramp_requests(self) -> float:
        """Expected requests of a run of the ramp."""
        return (RATE_FIRST + RATE_LAST) / 2 * self.seconds

    @property
    def constant_requests(self) -> int:
        """Requests of a run at a constant load."""
        return round(basic_queue().arrival_rate_per_s * (self.warm_up_s + self.constant_s))


mean_row = partial(Row.mean, tolerance=CALIBRATED)


def measured(model: str, profile: Profile, effort: Effort, folder: Path) -> dict[str, list[Summary]]:
    """Return the summaries of all runs of each rule. All rules get the same arrivals."""
    profile_path = folder / f"{model}.json"
    profile.save(profile_path)
    by_rule: dict[str, list[Summary]] = {name: [] for name in RULES}
    for name, rule in RULES.items():
        for run in range(effort.runs):
            trace = folder / f"{run}.csv"
            if not trace.exists():
                write_trace(trace, ramp(np.random.default_rng([effort.seed, run]), effort.seconds))
            scenario = Scenario(trace=str(trace), profile=str(profile_path), barrier=True, predictions="none")
            by_rule[name].append(simulate(scenario, rule.scheduling, dispatch=rule.dispatch))
    return by_rule


def compared(model: str, effort: Effort, folder: Path) -> Iterator[Row]:
    """Latency and energy of every rule."""
    profile = engine_profiles()[model]
    by_rule = measured(model, profile, effort, folder)
    for name, runs in by_rule.items():
        case: Case = {"model": model, "rule": name}
        latency = mean_row(FIGURE, case, "mean latency", "ms", [1e3 * run.latency_s_mean for run in runs])
        if name == "rate" and model in MODELS:
            note = "the assumed intercept was chosen for it"
            latency = replace(latency, expected=MODELS[model].latency_ms, kind="fitted", note=note)
        yield latency
        latest = [1e3 * run.latency_s_p95 for run in runs]
        yield mean_row(FIGURE, case, "95th percentile of the latency", "ms", latest)
        efficiencies = [run.completed / run.energy_j for run in runs if run.energy_j is not None]
        yield mean_row(FIGURE, case, "requests per joule", "1/J", efficiencies)
        yield mean_row(FIGURE, case, "mean batch size", "", [run.batch_size_mean for run in runs])
        yield mean_row(FIGURE, case, "utilisation", "1", [run.utilisation for run in runs])
    slope_ms, intercept_ms = 1e3 * profile.step_s.slope, 1e3 * profile.step_s.intercept
    note = profile.source
    yield Row("Profiles", {"model": model}, "slope of a batch's time", "ms", slope_ms, note=note)
    yield Row("Profiles", {"model": model}, "intercept of a batch's time", "ms", intercept_ms, note=note)


def ratios(rows: Rows, models: tuple[str, ...]) -> Iterator[Row]:
    """Statements of the text about the three techniques."""
    gains: dict[str, float] = {}
    for model in models:
        latency = {name: rows.number(FIGURE, "mean latency", model=model, rule=name) for name in RULES}
        efficiency = {name: rows.number(FIGURE, "requests per joule", model=model, rule=name) for name in RULES}
        gains[model] = 100 * (efficiency["rate"] / efficiency["ad hoc"] - 1)
        case: Case = {"model": model}
        yield Row("Ratios", case, "requests per joule, rate above ad hoc", "%", gains[model])
        yield Row("Ratios", case, "latency, rate over ad hoc", "1", latency["rate"] / latency["ad hoc"])
        yield Row("Ratios", case, "latency, largest batch over rate", "1", latency["largest batch"] / latency["rate"])
        both = latency["smdp"] < latency["rate"] and efficiency["smdp"] > efficiency["rate"]
        yield Row("Ratios", case, SMDP_IS_BETTER, HOLDS, float(both))
    four = [model for model in models if model in MODELS]
    efficiencies = [rows.number(FIGURE, "requests per joule", model=model, rule="rate") for model in four]
    if len(four) < len(MODELS):
        return
    note = "the assumed powers were chosen for it"
    for name, value, published in (
        ("least", min(efficiencies), EFFICIENCY_LEAST),
        ("greatest", max(efficiencies), EFFICIENCY_MOST),
    ):
        case = {"rule": "rate"}
        quantity = f"{name} requests per joule"
        yield Row(FIGURE, case, quantity, "1/J", value, published, CALIBRATED, note=note, kind="fitted")
    most = max(gains[model] for model in four)
    yield Row("Ratios", {}, "requests per joule, rate above ad hoc, at most", "%", most, GAIN_OVER_AD_HOC, CALIBRATED)
    times = [rows.number("Ratios", "latency, largest batch over rate", model=model) for model in four]
    mean = float(np.exp(np.mean(np.log(times))))
    note = "geometric mean over the four; depends on the assumed deadline"
    yield Row("Ratios", {}, "latency, largest batch over rate", "1", mean, TIMES_BELOW_LARGEST, CALIBRATED, note=note)
    close = all(rows.number("Ratios", "latency, rate over ad hoc", model=model) < 1.1 for model in four)
    yield claim("Ratios", {}, CLOSE, close)


def constant_load(effort: Effort) -> Iterator[Row]:
    """The rule as printed at a constant load on SMDP-J's basic scenario, beside rules whose W can be computed."""
    queue = basic_queue()
    mean_size = preferred_size(queue.arrival_rate_per_s, profiles.PROFILES[BASIC])
    exact = {f"static:{size}": queue.evaluate(queue.static(size)) for size in (8, mean_size)}
    exact["greedy"] = queue.evaluate(queue.greedy())
    for release in CONSTANT_RELEASES:
        runs = [_constant(release, effort, run) for run in range(effort.constant_runs)]
        note = f"after {effort.warm_up_s:g} s"
        note += f"; exact: {1e3 * exact[release].response_s_mean:.4g} ms" if release in exact else ""
        case: Case = {"release": release, "load": CONSTANT_LOAD}
        yield mean_row(CONSTANT, case, "mean latency", "ms", [1e3 * latency_s for latency_s, _ in runs], note=note)
        yield mean_row(CONSTANT, case, "utilisation", "1", [busy for _, busy in runs])
    yield from _mean_counts(mean_size, exact[f"static:{mean_size}"])


def basic_queue() -> Queue:
    """Return SMDP-J's basic scenario at the constant load."""
    profile = profiles.PROFILES[BASIC]
    sizes = np.arange(1, BATCH_MAX + 1)
    step_s = profile.step_s.at(sizes)
    rate_per_s = CONSTANT_LOAD * BATCH_MAX / step_s[-1]
    return Queue(float(rate_per_s), ServiceTimes.deterministic(step_s), profile.step_j.at(sizes))


def preferred_size(arrival_rate_per_s: float, profile: Profile) -> int:
    """Algorithm 1: return the least size, from 2 on, whose throughput exceeds the rate; BATCH_MAX without one."""
    sizes = np.arange(2, BATCH_MAX + 1)
    enough = sizes / profile.step_s.at(sizes) > arrival_rate_per_s
    return int(sizes[enough.argmax()]) if enough.any() else BATCH_MAX


def _mean_counts(size: int, exact: Evaluation) -> Iterator[Row]:
    """The rule as printed if every count equalled its mean: static batches of one size."""
    case: Case = {"release": f"static:{size}", "load": CONSTANT_LOAD}
    note = "exact; rate, if every count were its mean"
    yield Row(CONSTANT, case, "mean latency", "ms", 1e3 * exact.response_s_mean, note=note)
    yield Row(CONSTANT, case, "utilisation", "1", exact.utilisation, note=note)


def _constant(release: str, effort: Effort, run: int) -> tuple[float, float]:
    """Simulate, and return `after_warm_up` of the run."""
    scenario = Scenario(
        requests=effort.constant_requests,
        load=CONSTANT_LOAD,
        lengths="constant:1",
        profile=BASIC,
        barrier=True,
        predictions="none",
        seed=1_000 * effort.seed + run,
    )
    wait_s = RULES["rate repaired"].wait_s if release == "rate-headroom" else None
    scheduling = Rule(release, wait_s=wait_s).scheduling.resolved(scenario.barrier)
    work = prepare(scenario, scheduling)
    recorder = Recorder(len(work))
    run_workload(scenario, scheduling, work, dispatch=DispatchConfig(), recorder=recorder)
    return after_warm_up(recorder, effort.warm_up_s)


def after_warm_up(recorder: Recorder, warm_up_s: float) -> tuple[float, float]:
    """Return the mean latency (s) of arrivals from warm_up_s on, and the utilisation from then to the last arrival.

    recorder : of a run of one barrier engine
    """
    arrived, started, ended = map(np.array, (recorder.arrived_s, recorder.started_s, recorder.ended_s))
    late = arrived >= warm_up_s
    batches = np.unique(np.stack([started, ended]), axis=1).clip(warm_up_s, arrived[-1])  # (start and end, batches)
    busy_s = float((batches[1] - batches[0]).sum())
    return float((ended - arrived)[late].mean()), busy_s / float(arrived[-1] - warm_up_s)


def measure(seed: int, quick: bool, report: Report) -> Rows:
    effort = Effort.quick(seed) if quick else Effort(seed)
    rows = Rows()
    rows.extend([_rate_curve(effort)])
    with tempfile.TemporaryDirectory() as folder:
        text, work = f"{len(RULES)} rules, {effort.runs} runs each", len(RULES) * effort.runs * effort.ramp_requests
        parts = [(f"{model}: {text}", work, partial(compared, model, effort, Path(folder))) for model in effort.models]
        work = len(CONSTANT_RELEASES) * effort.constant_runs * effort.constant_requests
        rows.extend(in_parts([*parts, ("constant load", work, partial(constant_load, effort))], report))
    rows.extend(ratios(rows, effort.models))
    return rows


def _rate_curve(effort: Effort) -> Row:
    """Fig. 2 (a): arrivals in each second of the first run."""
    seconds = np.arange(math.ceil(effort.seconds))
    arrivals_s = ramp(np.random.default_rng([effort.seed, 0]), effort.seconds)
    counts = np.bincount(arrivals_s.astype(int), minlength=seconds.size)
    return Row.of_curve(FIGURE, {"run": 0}, "arrivals a second", "1/s", "s", seconds, counts)
