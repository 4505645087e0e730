"""From a scenario to what a simulation serves and the engines that serve it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from bins.profile import PROFILES, Profile, resolve
from llmserve.errors import ConfigError
from llmserve.policies import SchedulingConfig
from llmserve.request import EngineInfo
from llmserve.simulation import workload
from llmserve.simulation.engine_model import ProfileEngine, StepEngine, TimedEngine
from llmserve.simulation.predictions import PREDICTIONS_HELP, TRAINED, Predictions, predict

EDGES_SAMPLE = 4_000  # lengths that the first edges are made of
LOAD_SAMPLE = 40_000  # lengths that an engine's capacity is computed from
STEP_FIELDS = ("step_s", "prefill_s", "prefill_s_per_token")
EXCLUDED = {  # what each of these leaves no room for
    "profile": STEP_FIELDS,
    "engine": ("profile", "engines", *STEP_FIELDS),
    "load": ("arrival_rate",),
    "trace": ("lengths", "prompts", "arrivals"),
    "trace_speed": ("arrival_rate", "load"),
    "prompts": ("lengths",),
}
REQUESTS, ARRIVAL_RATE, LENGTHS, STEP_S = 10_000, 5.0, "lognormal:5.2,0.8", 0.01  # where nothing is said
BETWEEN_BINS = ("neighbour:", "confusion:")  # predictions whose mistakes are so
KIND = re.compile(r"^(?:([1-9]\d*)x)?(.+?)(?::([1-9]\d*))?$")  # [COUNTx]PROFILE[:SLOTS]

T = TypeVar("T")
Rate = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(ge=0)]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What fixes a simulated run besides the scheduling; the same scenario gives the same journal, byte for byte.

    None where a default or another field decides.  arrival_rate  requests a second.  A barrier batch takes prefill_s +
    step_s * its longest length, or what its profile says.
    """

    requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description=f"how many arrive (default {REQUESTS}); of a trace: at most (default: all)"),
    ] = None
    arrival_rate: Annotated[
        Rate | None,
        Meta(description=f"arrivals a second, on average; inf: all at once (default {ARRIVAL_RATE}, or the trace's)"),
    ] = None
    load: Annotated[
        Rate | None,
        Meta(
            description="instead of arrival-rate: arrivals at this share of what the engines can serve. Slots that "
            "refill: all of them taken, each for its own answer; above 1 the queue grows without end. --barrier: full "
            "batches of one bin, each as long as its longest answer; more bins serve more than that",
        ),
    ] = None
    arrivals: Annotated[
        str | None, Meta(description=f"how they are spread: {workload.ARRIVALS_HELP} (default poisson)")
    ] = None
    lengths: Annotated[str | None, Meta(description=f"output tokens: {workload.LENGTHS_HELP} (default {LENGTHS})")] = (
        None
    )
    lengths_factor: Annotated[Rate | None, Meta(description="times as long is every answer (default 1)")] = None
    trace: Annotated[
        str | None,
        Meta(
            description=f"CSV file (.gz: compressed) of arrivals and lengths, by its columns "
            f"{', '.join(workload.TRACE_COLUMNS)}; instead of arrivals and lengths. With arrival-rate or load it is "
            "replayed as fast as that asks for"
        ),
    ] = None
    trace_speed: Annotated[Rate | None, Meta(description="times as fast as the trace was recorded (default 1)")] = None
    prompts: Annotated[
        str | None,
        Meta(
            description="instead of lengths: file of prompts and their answers' lengths, such as serve's --record "
            "writes (FILE[:COLUMN], what llmserve train takes as --data; COLUMN: the output tokens); each "
            "request is one of its rows, drawn at random"
        ),
    ] = None
    slo_s: Annotated[
        tuple[Rate, ...],
        Meta(
            description="each answer is wanted within so many seconds of its arrival (default: whenever); of several, "
            "each is wanted within one of them, any as often"
        ),
    ] = ()
    streaming: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of the clients that stream: an order that preempts stops no answer of which a client "
            "has seen a byte, and theirs begins with its first token; 0: every answer can be stopped until its end",
        ),
    ] = 0.0
    predictions: Annotated[str, Meta(description=f"what is predicted of them: {PREDICTIONS_HELP}")] = "oracle"
    profile: Annotated[
        str | None,
        Meta(
            description=f"what steps cost: {', '.join(PROFILES)}, or a file; instead of step-s and prefill-s, and "
            "energy is reported"
        ),
    ] = None
    step_s: Annotated[Seconds | None, Meta(description=f"seconds a token (default {STEP_S})")] = None
    prefill_s: Annotated[Seconds | None, Meta(description="seconds before the first token (default 0)")] = None
    prefill_s_per_token: Annotated[
        Seconds | None,
        Meta(description="and more of them for each token of the prompt, where that is known (default 0)"),
    ] = None
    engines: Annotated[int, Meta(ge=1, description="engines of one kind")] = 1
    engine: Annotated[
        tuple[str, ...],
        Meta(
            description="instead of engines and profile: engines of this profile, a name or a file, with slots of "
            "their own; repeat it for engines of several kinds",
            extra={"metavar": "[COUNTx]PROFILE[:SLOTS]"},
        ),
    ] = ()
    barrier: Annotated[bool, Meta(description="engines run a batch to its end; else slots refill one by one")] = False
    slots: Annotated[int, Meta(ge=1, description="of a refill engine")] = 8
    look_ahead: Annotated[int, Meta(ge=0, description="requests that a refill engine may hold beyond its slots")] = 0
    last_batch: Annotated[
        Literal["flush", "drop"], Meta(description="partial batches left after the last arrival run, or are dropped")
    ] = "flush"
    seed: Annotated[int, Meta(ge=0, description="of every random draw")] = 0

    def check(self) -> None:
        """Raises ConfigError on settings that contradict each other."""
        given = {field.name for field in msgspec.structs.fields(self) if getattr(self, field.name) != field.default}
        for name, others in EXCLUDED.items():
            for other in others:
                if {name, other} <= given:
                    raise ConfigError(f"{other} cannot be given with {name}, which decides it")
        if self.trace_speed is not None and self.trace is None:
            raise ConfigError("trace_speed: there is no trace to speed up")
        if self.predictions.startswith(TRAINED) and self.prompts is None:
            raise ConfigError(f"predictions {self.predictions!r}: a trained predictor needs --prompts to read")

    def sequences_max(self, scheduling: SchedulingConfig) -> int:
        """That run on one engine at once, unless the engine has slots of its own."""
        return scheduling.full_batch if self.barrier else self.slots


@dataclass(frozen=True, slots=True)
class Answers:
    """What was asked and how long the answers were, one row each.

    output_tokens  (rows,) > 0
    input_tokens   (rows,) of the prompts, about; 0 where that is not known
    forecasts      (rows, Q) equally likely lengths that a predictor says of them, ascending; None: there is none
    """

    output_tokens: workload.Lengths
    input_tokens: workload.Lengths
    forecasts: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return self.output_tokens.size

    def rows(self, rows: NDArray[np.intp]) -> Answers:
        """These rows, in this order; they may repeat."""
        forecasts = None if self.forecasts is None else self.forecasts[rows]
        return Answers(self.output_tokens[rows], self.input_tokens[rows], forecasts)

    def times(self, factor: float) -> Answers:
        """Answers, and what is forecast of them, so many times as long."""
        forecasts = None if self.forecasts is None else factor * self.forecasts
        return Answers(factor * self.output_tokens, self.input_tokens, forecasts)


@dataclass(frozen=True, slots=True)
class Workload:
    """What a run serves; request ids count from 0 in order of arrival.

    predictions         None: nothing predicts
    scores, lengths     of a sample of requests like these: what bins go by, and how long their answers are
    arrival_rate_per_s  asked for, or the trace's mean; inf when all come at once
    deadlines_s         (requests,); None: there are none
    streaming           ids of the requests whose clients stream
    """

    trace: workload.Trace
    predictions: Predictions | None
    scores: tuple[float, ...]
    lengths: tuple[float, ...]
    arrival_rate_per_s: float
    deadlines_s: workload.Times | None = None
    streaming: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.trace)


# ---- what arrives -----------------------------------------------------------------------------------------------


def prepare(scenario: Scenario, scheduling: SchedulingConfig, answers: Answers | None = None) -> Workload:
    """What the scenario serves. scheduling : resolved.  answers : those of scenario.prompts, where there are prompts.

    Lengths, arrivals, predictions and clients have random streams of their own: changing one leaves the others.
    The first edges come from a sample of the same length distribution, as a trained predictor would bring.
    Raises ConfigError on a scenario that makes no sense.
    """
    scenario.check()
    streams = [np.random.default_rng(child) for child in np.random.SeedSequence(scenario.seed).spawn(7)]
    lengths_rng, sample_rng, arrivals_rng, predictions_rng, load_rng, slo_rng, streaming_rng = streams
    if scenario.trace is not None:
        trace = _replayed(scenario, scheduling)
        rate_per_s = trace.rate_per_s
        asked = Answers(trace.output_tokens, trace.input_tokens)
        sample = asked.rows(sample_rng.permutation(len(asked))[:EDGES_SAMPLE])
    else:
        rate_per_s = _arrival_rate_per_s(scenario, scheduling, answers, load_rng)
        asked = _draw(scenario, answers, or_default(scenario.requests, REQUESTS), lengths_rng)
        arrivals_s = workload.draw_arrivals(scenario.arrivals or "poisson", rate_per_s, len(asked), arrivals_rng)
        trace = workload.Trace(arrivals_s, asked.output_tokens, asked.input_tokens)
        sample = _draw(scenario, answers, EDGES_SAMPLE, sample_rng)
    predictions = _predict(scenario, scheduling, asked, sample, predictions_rng)
    scores = _scores(scenario, scheduling, sample, _predict(scenario, scheduling, sample, sample, sample_rng))
    deadlines_s = trace.arrivals_s + slo_rng.choice(scenario.slo_s, len(trace)) if scenario.slo_s else None
    streaming = frozenset(np.flatnonzero(streaming_rng.random(len(trace)) < scenario.streaming).tolist())
    lengths = tuple(sample.output_tokens.tolist())
    return Workload(trace, predictions, scores, lengths, rate_per_s, deadlines_s, streaming)


def _replayed(scenario: Scenario, scheduling: SchedulingConfig) -> workload.Trace:
    """The trace, as fast as the scenario has it."""
    assert scenario.trace is not None
    trace = workload.read_trace(scenario.trace, scenario.requests)
    trace = replace(trace, output_tokens=or_default(scenario.lengths_factor, 1.0) * trace.output_tokens)
    if scenario.load is not None:
        asked = Answers(trace.output_tokens, trace.input_tokens)
        return workload.replay_at(trace, scenario.load * _capacity_per_s(scenario, scheduling, asked))
    if scenario.arrival_rate is not None:
        return workload.replay_at(trace, scenario.arrival_rate)
    return workload.replay_faster(trace, or_default(scenario.trace_speed, 1.0))


def _draw(scenario: Scenario, answers: Answers | None, count: int, rng: np.random.Generator) -> Answers:
    """So many requests, of the prompts' rows or of the lengths' distribution."""
    if scenario.prompts is None:
        lengths = workload.draw_lengths(or_default(scenario.lengths, LENGTHS), count, rng)
        drawn = Answers(lengths, np.zeros(count))
    elif answers is None:
        raise ConfigError(f"prompts: the answers of {scenario.prompts!r} are to be given, for they were not read")
    else:
        drawn = answers.rows(rng.integers(len(answers), size=count))
    return drawn if scenario.lengths_factor is None else drawn.times(scenario.lengths_factor)


def _arrival_rate_per_s(
    scenario: Scenario, scheduling: SchedulingConfig, answers: Answers | None, rng: np.random.Generator
) -> float:
    if scenario.load is None:
        return or_default(scenario.arrival_rate, ARRIVAL_RATE)
    return scenario.load * _capacity_per_s(scenario, scheduling, _draw(scenario, answers, LOAD_SAMPLE, rng))


def _capacity_per_s(scenario: Scenario, scheduling: SchedulingConfig, sample: Answers) -> float:
    """Requests a second that the engines serve when nothing of them is idle: the rate at which the load is 1.

    Barrier engines run full batches of one bin, in which all wait for the longest. Where slots refill each request
    holds its own as long as it runs, in steps that all slots share.
    """
    lengths, prompt_tokens_mean = np.sort(sample.output_tokens).tolist(), float(sample.input_tokens.mean())
    tokens_mean = float(sample.output_tokens.mean())
    capacity_per_s = 0.0
    for engine in engines(scenario, scheduling, []):
        costs, slots = engine.costs, engine.info.slots
        if scenario.barrier:
            taken_s = costs.batch_s(lengths, slots, prompt_tokens_mean)
        else:
            taken_s = costs.slot_s(tokens_mean, slots, prompt_tokens_mean)
        if taken_s <= 0:
            raise ConfigError("load: engines whose steps take no time have no capacity")
        capacity_per_s += slots / taken_s
    return capacity_per_s


def _predict(
    scenario: Scenario, scheduling: SchedulingConfig, asked: Answers, sample: Answers, rng: np.random.Generator
) -> Predictions | None:
    """Mistakes in as many bins as the scheduler has are mistakes in its own, as long as these stay as they begin."""
    if not scenario.predictions.startswith(TRAINED):
        lengths, like = asked.output_tokens, sample.output_tokens
        return predict(scenario.predictions, lengths, rng, sample=like, edges=scheduling.edges)
    if asked.forecasts is None:
        raise ConfigError(f"predictions {scenario.predictions!r}: the answers came without a predictor's forecasts")
    return Predictions.of(asked.forecasts)


def _scores(
    scenario: Scenario, scheduling: SchedulingConfig, sample: Answers, predictions: Predictions | None
) -> tuple[float, ...]:
    """What bins go by, of a sample: the risk of what is predicted of it, or its medians.

    Without predictions, and where mistakes are mistakes between bins of real lengths, its very lengths.
    """
    if predictions is None or scenario.predictions.startswith(BETWEEN_BINS):
        return tuple(sample.output_tokens.tolist())
    if predictions.quantiles is None:
        return tuple(predictions.medians.tolist())
    return scheduling.scores(predictions.quantiles.tolist())


# ---- the engines ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SimulatedKind:
    """Engines that are alike.

    slots    of a barrier engine, its largest batch
    profile  None: every step takes the same time
    name     of the profile, or its file, as it was asked for
    """

    count: int
    slots: int
    profile: Profile | None
    name: str | None


def engine_kinds(scenario: Scenario, scheduling: SchedulingConfig) -> list[SimulatedKind]:
    """scheduling : resolved. Raises ConfigError on a profile that cannot be read."""
    slots = scenario.sequences_max(scheduling)
    try:
        if not scenario.engine:
            profile = None if scenario.profile is None else resolve(scenario.profile)
            return [SimulatedKind(scenario.engines, slots, profile, scenario.profile)]
        return [_kind(text, slots, scenario) for text in scenario.engine]
    except ValueError as error:
        raise ConfigError(f"{'engine' if scenario.engine else 'profile'}: {error}") from error


def _kind(text: str, slots: int, scenario: Scenario) -> SimulatedKind:
    """Engines as asked for. Raises ValueError when the text is none of KIND, or names no profile."""
    match = KIND.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not [COUNTx]PROFILE[:SLOTS]")
    return SimulatedKind(int(match[1] or 1), _own_slots(match[3], slots, scenario), resolve(match[2]), match[2])


def _own_slots(asked: str | None, slots: int, scenario: Scenario) -> int:
    """A barrier engine runs no more than a batch, and a smaller one takes batches in parts."""
    if asked is None:
        return slots
    return min(int(asked), slots) if scenario.barrier else int(asked)


def engines(
    scenario: Scenario, scheduling: SchedulingConfig, lengths: Sequence[float], streaming: Collection[int] = ()
) -> list[StepEngine]:
    """Engines of every kind, named engine0, engine1, ... scheduling : resolved.  lengths : output tokens by request id.
    streaming : ids of requests whose first bytes they tell of.

    Raises ConfigError on a profile that cannot be read, or is of fewer sequences than its engines have slots.
    """
    look_ahead = 0 if scenario.barrier else scenario.look_ahead
    made: list[StepEngine] = []
    for kind in engine_kinds(scenario, scheduling):
        for _ in range(kind.count):
            info = EngineInfo(f"engine{len(made)}", kind.slots, scenario.barrier, look_ahead)
            made.append(_engine(scenario, info, lengths, streaming, kind.profile))
    if scheduling.uses_profiles:
        for engine in made:
            engine.info = msgspec.structs.replace(engine.info, speeds={"": engine.costs.times})
    return made


def _engine(
    scenario: Scenario, info: EngineInfo, lengths: Sequence[float], streaming: Collection[int], profile: Profile | None
) -> StepEngine:
    if profile is None:
        return TimedEngine(
            info,
            lengths,
            step_s=or_default(scenario.step_s, STEP_S),
            prefill_s=or_default(scenario.prefill_s, 0.0),
            prefill_s_per_token=or_default(scenario.prefill_s_per_token, 0.0),
            streaming=streaming,
        )
    try:
        return ProfileEngine(info, lengths, profile, streaming)
    except ValueError as error:
        raise ConfigError(f"{'engine' if scenario.engine else 'profile'}: {error}") from error


def or_default(value: T | None, default: T) -> T:
    return default if value is None else value
