"""The settings of a simulation, and from them its requests and its engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from bins.profile import PROFILES, Profile, resolve
from llmserve.errors import ConfigError
from llmserve.request import BLOCK_TOKENS, EngineInfo
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation import workload
from llmserve.simulation.engine_model import Costs, StepEngine
from llmserve.simulation.kv_engine import SEQUENCES_MAX, STEP_TOKENS, KVEngine, KVLimits
from llmserve.simulation.kv_pool import Text
from llmserve.simulation.online import OnlineRows
from llmserve.simulation.predictions import ONLINE, PREDICTIONS_HELP, TRAINED, Predictions, predict
from llmserve.simulation.programs import World
from llmserve.simulation.trace_files import FORMS, OWN

EDGES_SAMPLE = 4_000  # lengths for the first edges
LOAD_SAMPLE = 40_000  # lengths for an engine's capacity
STRAIGHT = 10**6  # requests that an engine may hold that gets all at once
SLOTS = 8  # of a refill engine without a KV cache
STEP_FIELDS = ("step_s", "prefill_s", "prefill_s_per_token")
EXCLUDED = {  # fields that cannot be set together with the field on the left
    "profile": STEP_FIELDS,
    "engine": ("profile", "engines", *STEP_FIELDS),
    "load": ("arrival_rate",),
    "trace": ("lengths", "prompts", "arrivals"),
    "trace_speed": ("arrival_rate", "load"),
    "prompts": ("lengths",),
    "programs": ("trace", "prompts", "lengths", "arrivals", "load", "arrival_rate", "requests", "slo_s", "streaming"),
}
REQUESTS, ARRIVAL_RATE, LENGTHS, STEP_S = 10_000, 5.0, "lognormal:5.2,0.8", 0.01  # defaults
PROGRAMS_PROFILE, PROGRAMS_KV_TOKENS = "h100-llama-3.1-8b-contexts", 430_000  # what an H100 has left for this model
DECIDED_ONLINE = ("lengths", "lengths_factor", "trace")  # fields that the rows of online:FILE decide
BETWEEN_BINS = ("neighbour:", "confusion:")  # predictions that mistake one bin for another
KIND = re.compile(r"^(?:([1-9]\d*)x)?(.+?)(?::([1-9]\d*))?$")  # [COUNTx]PROFILE[:SLOTS]

T = TypeVar("T")
Rate = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(ge=0)]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a simulated run besides the scheduling; the same scenario gives the same journal, byte for byte.

    None where a default or another field decides.  arrival_rate : requests/s.  A barrier batch takes prefill_s + step_s
    * longest length, or the time of its profile.
    """

    requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description=f"number of requests (default {REQUESTS}); of a trace: at most (default: all); with "
            "predictions online:FILE: by default each row of the file is a request"
        ),
    ] = None
    arrival_rate: Annotated[
        Rate | None,
        Meta(description=f"mean arrivals/s; inf: all at once (default {ARRIVAL_RATE}, or the trace's own rate)"),
    ] = None
    load: Annotated[
        Rate | None,
        Meta(
            description="instead of arrival-rate: arrivals at this share of the engines' capacity. Without --barrier "
            "the capacity is that of full slots, and above 1 the queue grows without end. With --barrier it is that "
            "of full batches of one bin, each as long as its longest answer; more bins have a larger capacity",
        ),
    ] = None
    arrivals: Annotated[
        str | None, Meta(description=f"arrival process: {workload.ARRIVALS_HELP} (default poisson)")
    ] = None
    lengths: Annotated[str | None, Meta(description=f"output tokens: {workload.LENGTHS_HELP} (default {LENGTHS})")] = (
        None
    )
    lengths_factor: Annotated[Rate | None, Meta(description="factor on the length of every answer (default 1)")] = None
    trace: Annotated[
        str | None,
        Meta(
            description="instead of arrivals and lengths: file of requests, CSV or JSON lines, plain or compressed. "
            f"Its columns: {', '.join(OWN.columns)}, or as published: {', '.join(form.name for form in FORMS[1:])}. "
            "With arrival-rate or load the trace is replayed at that rate"
        ),
    ] = None
    trace_speed: Annotated[Rate | None, Meta(description="factor on the trace's arrival rate (default 1)")] = None
    prompts: Annotated[
        str | None,
        Meta(
            description="instead of lengths: file of prompts and the lengths of their answers, such as serve's "
            "--record writes (FILE[:COLUMN], as for llmserve train --data; COLUMN: the output tokens); each "
            "request is a row of the file; in a random order, all rows come before one comes again"
        ),
    ] = None
    programs: Annotated[
        str | None,
        Meta(
            description="instead of arrivals and lengths: file of sessions of agents and chats, JSON lines, plain or "
            "compressed. Each request comes when the one before has been answered and its tool has been called. The "
            "engine has a KV cache, and the results are times of turns; by default the profile is "
            f"{PROGRAMS_PROFILE}, and kv-tokens {PROGRAMS_KV_TOKENS}",
            extra={"metavar": "FILE"},
        ),
    ] = None
    slo_s: Annotated[
        tuple[Rate, ...],
        Meta(
            description="deadline of each answer in seconds after the request's arrival (default: no deadline); of "
            "several values each request draws one"
        ),
    ] = ()
    streaming: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of the clients that stream: an order that preempts stops no answer of which a client "
            "has received a byte; a stream sends its first byte with the first token, other answers at their end",
        ),
    ] = 0.0
    predictions: Annotated[str, Meta(description=f"predictions of the lengths: {PREDICTIONS_HELP}")] = "oracle"
    profile: Annotated[
        str | None,
        Meta(
            description=f"instead of step-s and prefill-s: times and energy of the steps, by name or file: "
            f"{', '.join(PROFILES)}; the report then has the energy"
        ),
    ] = None
    step_s: Annotated[Seconds | None, Meta(description=f"seconds per token (default {STEP_S})")] = None
    prefill_s: Annotated[Seconds | None, Meta(description="seconds before the first token (default 0)")] = None
    prefill_s_per_token: Annotated[
        Seconds | None,
        Meta(description="further seconds for each known token of the prompt (default 0)"),
    ] = None
    engines: Annotated[int, Meta(ge=1, description="number of engines, all of one kind")] = 1
    engine: Annotated[
        tuple[str, ...],
        Meta(
            description="instead of engines and profile: engines of this profile (a name or a file) and these slots; "
            "repeat the flag for engines of several kinds",
            extra={"metavar": "[COUNTx]PROFILE[:SLOTS]"},
        ),
    ] = ()
    barrier: Annotated[
        bool, Meta(description="engines run a batch to its end; otherwise free slots refill one by one")
    ] = False
    slots: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description=f"slots of a refill engine (default {SLOTS}, or with kv-tokens {SEQUENCES_MAX})"),
    ] = None
    kv_tokens: Annotated[
        Annotated[int, Meta(ge=BLOCK_TOKENS)] | None,
        Meta(
            description="tokens in the KV cache of each engine. The engine then works as vLLM does: prompts take their "
            "part of the steps in chunks, prefixes are cached, and requests wait, or are preempted, for want of memory"
        ),
    ] = None
    step_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description=f"with kv-tokens: tokens in a step, of prompts and answers (default {STEP_TOKENS})"),
    ] = None
    look_ahead: Annotated[int, Meta(ge=0, description="requests that a refill engine may hold beyond its slots")] = 0
    last_batch: Annotated[
        Literal["flush", "drop"], Meta(description="partial batches after the last arrival run, or are dropped")
    ] = "flush"
    seed: Annotated[int, Meta(ge=0, description="seed of all random draws")] = 0

    @property
    def learns(self) -> bool:
        """Whether predictions are those of a learner, by the answers that have ended."""
        return self.predictions.startswith(ONLINE)

    @property
    def rows_file(self) -> str | None:
        """The file whose rows are the requests."""
        return self.predictions.removeprefix(ONLINE) if self.learns else self.prompts

    @property
    def with_defaults(self) -> Scenario:
        """The scenario with the engine that programs have where none is set."""
        if self.programs is None:
            return self
        costs = (self.profile, self.engine, *[getattr(self, name) for name in STEP_FIELDS])
        profile = self.profile if any(costs) else PROGRAMS_PROFILE
        return msgspec.structs.replace(self, profile=profile, kv_tokens=or_default(self.kv_tokens, PROGRAMS_KV_TOKENS))

    def check(self) -> None:
        """Raises ConfigError on settings that contradict each other."""
        changed = {field.name for field in msgspec.structs.fields(self) if getattr(self, field.name) != field.default}
        for name, excluded_names in EXCLUDED.items():
            for excluded in excluded_names:
                if {name, excluded} <= changed:
                    raise ConfigError(f"{excluded} cannot be given with {name}, which decides it")
        if self.learns and self.prompts not in (None, self.rows_file):
            raise ConfigError(f"prompts must be the file of predictions {self.predictions!r}, or left out")
        for excluded in DECIDED_ONLINE:
            if self.learns and excluded in changed:
                raise ConfigError(f"{excluded} cannot be given with predictions {self.predictions!r}, which decide it")
        if self.kv_tokens is not None and (self.barrier or self.load is not None):
            raise ConfigError("kv_tokens: only without barrier, and without load: memory decides what an engine serves")
        if self.kv_tokens is None and self.step_tokens is not None:
            raise ConfigError("step_tokens: only with kv_tokens")
        if self.programs is not None and self.learns:
            raise ConfigError(f"predictions {self.predictions!r}: programs have no prompts to learn from")
        if self.trace_speed is not None and self.trace is None:
            raise ConfigError("trace_speed: there is no trace to speed up")
        if self.predictions.startswith(TRAINED) and self.prompts is None:
            raise ConfigError(f"predictions {self.predictions!r}: a trained predictor needs --prompts to read")

    def sequences_max(self, scheduling: SchedulingConfig) -> int:
        """Sequences that run at once on an engine without its own number of slots."""
        default = SLOTS if self.kv_tokens is None else SEQUENCES_MAX
        return scheduling.full_batch if self.barrier else or_default(self.slots, default)


@dataclass(frozen=True, slots=True)
class Answers:
    """Lengths of prompts and answers, one row each.

    output_tokens  (rows,) > 0
    input_tokens   (rows,) estimated tokens of the prompts; 0 where unknown
    forecasts      (rows, Q) equally likely lengths from a predictor, ascending; None: no predictor
    online         the rows for a learner; None: nothing is learnt during a run
    """

    output_tokens: workload.Lengths
    input_tokens: workload.Lengths
    forecasts: NDArray[np.float64] | None = None
    online: OnlineRows | None = None

    def __len__(self) -> int:
        return self.output_tokens.size

    def rows(self, rows: NDArray[np.intp]) -> Answers:
        """The rows of these numbers, in this order; a row may repeat."""
        forecasts = None if self.forecasts is None else self.forecasts[rows]
        online = None if self.online is None else self.online.at(rows)
        return Answers(self.output_tokens[rows], self.input_tokens[rows], forecasts, online)

    def times(self, factor: float) -> Answers:
        """The answers and their forecasts, with all lengths multiplied by the factor."""
        forecasts = None if self.forecasts is None else factor * self.forecasts
        return Answers(factor * self.output_tokens, self.input_tokens, forecasts)


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run; request ids count from 0 in order of arrival.

    predictions         None: no predictions
    scores, lengths     of a sample of such requests: scores that bins sort by, and lengths of the answers
    arrival_rate_per_s  of the settings, or the trace's mean; inf when all come at once
    deadlines_s         (requests,); None: no deadlines
    streaming           ids of the requests whose clients stream
    online              the rows of the requests, for a learner; None: nothing is learnt during a run
    """

    trace: workload.Trace
    predictions: Predictions | None
    scores: tuple[float, ...]
    lengths: tuple[float, ...]
    arrival_rate_per_s: float
    deadlines_s: workload.Times | None = None
    streaming: frozenset[int] = frozenset()
    online: OnlineRows | None = None

    def __len__(self) -> int:
        return len(self.trace)


# ---- the requests -----------------------------------------------------------------------------------------------


def prepare(
    scenario: Scenario, scheduling: SchedulingConfig, answers: Answers | None = None, world: World | None = None
) -> Workload:
    """The requests of the scenario. scheduling : resolved.  answers : the rows of scenario.rows_file, if it is set.
    world : of scenario.programs; then the arrivals follow from the run

    Lengths, arrivals, predictions and clients have separate random streams: a change of one leaves the others the same.
    The first edges come from a sample of the same length distribution; a trained predictor would bring such a sample.
    A learner has no sample: its server starts without edges.
    Raises ConfigError on settings that contradict each other.
    """
    scenario.check()
    streams = [np.random.default_rng(child) for child in np.random.SeedSequence(scenario.seed).spawn(7)]
    lengths_rng, sample_rng, arrivals_rng, predictions_rng, load_rng, slo_rng, streaming_rng = streams
    if scenario.trace is not None or world is not None:
        trace = _replayed(scenario, scheduling) if world is None else world.trace()
        rate_per_s = trace.rate_per_s
        drawn = Answers(trace.output_tokens, trace.input_tokens)
        sample = drawn.rows(sample_rng.permutation(len(drawn))[:EDGES_SAMPLE])
    else:
        rate_per_s = _arrival_rate_per_s(scenario, scheduling, answers, load_rng)
        count = len(answers) if scenario.learns and answers is not None else REQUESTS
        drawn = _draw(scenario, answers, or_default(scenario.requests, count), lengths_rng)
        arrivals_s = workload.draw_arrivals(scenario.arrivals or "poisson", rate_per_s, len(drawn), arrivals_rng)
        trace = workload.Trace(arrivals_s, drawn.output_tokens, drawn.input_tokens)
        sample = _draw(scenario, answers, EDGES_SAMPLE, sample_rng)
    deadlines_s = trace.arrivals_s + slo_rng.choice(scenario.slo_s, len(trace)) if scenario.slo_s else None
    streaming = frozenset(np.flatnonzero(streaming_rng.random(len(trace)) < scenario.streaming).tolist())
    if scenario.learns:
        if drawn.online is None:
            raise ConfigError(f"predictions {scenario.predictions!r}: the answers came without the rows for a learner")
        return Workload(trace, None, (), (), rate_per_s, deadlines_s, streaming, drawn.online)
    predictions = _predict(scenario, scheduling, drawn, sample, predictions_rng)
    scores = _scores(scenario, scheduling, sample, _predict(scenario, scheduling, sample, sample, sample_rng))
    lengths = tuple(sample.output_tokens.tolist())
    return Workload(trace, predictions, scores, lengths, rate_per_s, deadlines_s, streaming)


def _replayed(scenario: Scenario, scheduling: SchedulingConfig) -> workload.Trace:
    """The trace at the rate and with the lengths of the scenario."""
    assert scenario.trace is not None
    trace = workload.read_trace(scenario.trace, scenario.requests)
    trace = replace(trace, output_tokens=or_default(scenario.lengths_factor, 1.0) * trace.output_tokens)
    if scenario.load is not None:
        answers = Answers(trace.output_tokens, trace.input_tokens)
        return workload.replay_at(trace, scenario.load * _capacity_per_s(scenario, scheduling, answers))
    if scenario.arrival_rate is not None:
        return workload.replay_at(trace, scenario.arrival_rate)
    return workload.replay_faster(trace, or_default(scenario.trace_speed, 1.0))


def _draw(scenario: Scenario, answers: Answers | None, count: int, rng: np.random.Generator) -> Answers:
    """Draw `count` requests, from the rows of the prompts or from the distribution of the lengths.

    Each row is drawn once before any row is drawn again: a learner would know the rows that repeat.
    """
    if scenario.rows_file is None:
        lengths = workload.draw_lengths(or_default(scenario.lengths, LENGTHS), count, rng)
        drawn = Answers(lengths, np.zeros(count))
    elif answers is None:
        raise ConfigError(f"prompts: the answers of {scenario.rows_file!r} were not read: pass them as `answers`")
    else:
        rounds = -(-count // len(answers))
        drawn = answers.rows(np.concatenate([rng.permutation(len(answers)) for _ in range(rounds)])[:count])
    return drawn if scenario.lengths_factor is None else drawn.times(scenario.lengths_factor)


def _arrival_rate_per_s(
    scenario: Scenario, scheduling: SchedulingConfig, answers: Answers | None, rng: np.random.Generator
) -> float:
    if scenario.load is None:
        return or_default(scenario.arrival_rate, ARRIVAL_RATE)
    return scenario.load * _capacity_per_s(scenario, scheduling, _draw(scenario, answers, LOAD_SAMPLE, rng))


def _capacity_per_s(scenario: Scenario, scheduling: SchedulingConfig, sample: Answers) -> float:
    """Requests/s that the engines serve when no slot is idle: the rate of load 1.

    Barrier engines run full batches of one bin, which last as long as their longest answers. On refill engines a
    request holds one slot while it runs, in steps that all slots share.
    """
    lengths, prompt_tokens_mean = np.sort(sample.output_tokens).tolist(), float(sample.input_tokens.mean())
    tokens_mean = float(sample.output_tokens.mean())
    capacity_per_s = 0.0
    for engine in engines(scenario, scheduling, []):
        costs, slots = engine.costs, engine.info.slots
        if scenario.barrier:
            busy_s = costs.batch_s(lengths, slots, prompt_tokens_mean)
        else:
            busy_s = costs.slot_s(tokens_mean, slots, prompt_tokens_mean)
        if busy_s <= 0:
            raise ConfigError("load: engines whose steps take no time have no finite capacity")
        capacity_per_s += slots / busy_s
    return capacity_per_s


def _predict(
    scenario: Scenario, scheduling: SchedulingConfig, answers: Answers, sample: Answers, rng: np.random.Generator
) -> Predictions | None:
    """Predictions of the answers. Mistakes between as many bins as the scheduler has use its first edges."""
    if not scenario.predictions.startswith(TRAINED):
        lengths, similar = answers.output_tokens, sample.output_tokens
        return predict(scenario.predictions, lengths, rng, sample=similar, edges=scheduling.edges)
    if answers.forecasts is None:
        raise ConfigError(f"predictions {scenario.predictions!r}: the answers came without a predictor's forecasts")
    return Predictions.of(answers.forecasts)


def _scores(
    scenario: Scenario, scheduling: SchedulingConfig, sample: Answers, predictions: Predictions | None
) -> tuple[float, ...]:
    """The scores that bins sort by, of a sample: the risks of its predicted quantiles, or its predicted medians.

    Without predictions, and for mistakes between bins of real lengths: the real lengths.
    """
    if predictions is None or scenario.predictions.startswith(BETWEEN_BINS):
        return tuple(sample.output_tokens.tolist())
    if predictions.quantiles is None:
        return tuple(predictions.medians.tolist())
    return scheduling.scores(predictions.quantiles.tolist())


# ---- the engines ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SimulatedKind:
    """Engines of one kind.

    slots    of a barrier engine: its largest batch
    profile  None: every step takes the same time
    name     name or file of the profile, as in the settings
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
    """Parse the text of --engine. Raises ValueError when the text does not match KIND, or names no profile."""
    match = KIND.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not [COUNTx]PROFILE[:SLOTS]")
    return SimulatedKind(int(match[1] or 1), _own_slots(match[3], slots, scenario), resolve(match[2]), match[2])


def _own_slots(text: str | None, slots: int, scenario: Scenario) -> int:
    """The slots of an engine. A barrier engine has at most a full batch; with fewer slots it runs batches in parts."""
    if text is None:
        return slots
    return min(int(text), slots) if scenario.barrier else int(text)


SimulatedEngine = StepEngine | KVEngine


def engines(
    scenario: Scenario,
    scheduling: SchedulingConfig,
    lengths: Sequence[float],
    streaming: Collection[int] = (),
    texts: Sequence[Text] | None = None,
    *,
    tools: Sequence[tuple[str, ...]] = (),
    wants_first_token: Callable[[int], bool] | None = None,
    straight: bool = False,
    on_first_token: Callable[[int, float], None] | None = None,
) -> list[SimulatedEngine]:
    """Engines of every kind, named engine0, engine1, ... scheduling : resolved.  lengths : output tokens by request id.
    streaming : ids of requests whose clients stream.  texts : prompts by request id; None: they share nothing.
    tools : that answers call, by request id.  wants_first_token : as `wants` in KVEngine
    straight : all requests go to the engine at once, and wait there, by priority.  on_first_token : as in KVEngine

    Raises ConfigError on a profile that cannot be read, or that has fewer sequences than its engines have slots.
    """
    look_ahead = 0 if scenario.barrier else scenario.look_ahead
    fleet: list[SimulatedEngine] = []
    for kind in engine_kinds(scenario, scheduling):
        costs = _costs(scenario, kind)
        for _ in range(kind.count):
            info = EngineInfo(f"engine{len(fleet)}", kind.slots, scenario.barrier, look_ahead, scenario.kv_tokens)
            if straight:
                info = msgspec.structs.replace(info, look_ahead=STRAIGHT, tokens_max=None, by_priority=True)
            if scheduling.uses_profiles:
                info = msgspec.structs.replace(info, speeds={"": costs.times})
            if scenario.kv_tokens is None:
                fleet.append(StepEngine(info, lengths, costs, streaming))
                continue
            limits = KVLimits(scenario.kv_tokens, or_default(scenario.step_tokens, STEP_TOKENS), kind.slots)
            fleet.append(
                KVEngine(
                    info,
                    lengths,
                    costs,
                    limits,
                    texts=texts,
                    tools=tools,
                    streaming=streaming,
                    wants=wants_first_token,
                    on_first_token=on_first_token,
                )
            )
    return fleet


def _costs(scenario: Scenario, kind: SimulatedKind) -> Costs:
    if kind.profile is None:
        return Costs.constant(
            or_default(scenario.step_s, STEP_S),
            or_default(scenario.prefill_s, 0.0),
            kind.slots,
            prefill_s_per_token=or_default(scenario.prefill_s_per_token, 0.0),
        )
    try:
        return Costs.of(kind.profile, kind.slots)
    except ValueError as error:
        raise ConfigError(f"{'engine' if scenario.engine else 'profile'}: {error}") from error


def or_default(value: T | None, default: T) -> T:
    return default if value is None else value
