"""Replays a recording under other settings: the simulated cluster drives the very scheduler (settings/policies.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from bins.profile import Profile
from llmserve.errors import ConfigError
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.lengths import Learned
from llmserve.settings.policies import PLANNED, Settings, named, order_settings, tuned
from llmserve.simulation.cluster import EngineModel, SimulatedCluster
from llmserve.simulation.collector import collector_paused
from llmserve.simulation.engine_model import Costs, StepEngine
from llmserve.simulation.report import Recorder, elapsed
from llmserve.simulation.twin.past import PastRequest, Recording
from llmserve.simulation.twin.speed import costs_of

QUEUE_REQUESTS_MAX = 10**9  # a replay refuses no request: all candidates serve the same ones
REPLAYED = 5_000  # requests: enough for a p99, and for queues to build up
SAMPLE = 1_024  # forecasts that the first bin edges are fitted to
BLOCK = 50  # requests that stay together in copies, so that bursts and their lengths stay what they are
FIRST_COME: Settings = {"order": "fffs"}
PATIENCES = (3.0, 6.0, 12.0, 20.0, 30.0, 40.0, 60.0, 90.0, 120.0, 200.0, 400.0)
ORDERS: list[Settings] = [
    FIRST_COME,
    Settings(order="boost"),
    *[Settings(order="shortest", patience=patience) for patience in PATIENCES],
]
RELEASES: list[Settings] = [
    *[Settings(release="greedy", bins=bins) for bins in (1, 4, 8)],
    Settings(release="window", bins=1),
]
"""Further candidates where engines run batches to their end."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a candidate does with the recorded requests.

    settings           over those of the configuration
    latency_s          (requests,) in the order of arrival; nan: not answered
    in_time            (requests,) whether answered by the deadline; None: no request has a deadline
    joules_per_token   None: the engines' power is not known
    """

    settings: Settings
    latency_s: NDArray[np.float64]
    in_time: NDArray[np.bool_] | None = None
    joules_per_token: float | None = None

    @property
    def answered(self) -> int:
        return int((~np.isnan(self.latency_s)).sum())


class Twin:
    """Replays one recording. profile : for the power of the engines; None: it is not known.

    least       requests to replay (default: REPLAYED); a shorter recording is repeated, see `repeated`
    whole       a twin of more requests, whose engines and lengths this one has; None: they are fitted to the recording

    costs       of each engine, by name; lengths : of requests whose real lengths are not known
    observed_mean_s  mean latency of the recorded answers
    forecast    number of recorded requests whose real lengths are not known; they get one of their forecast's lengths
    recorded    number of recorded requests, the first ones of a replay
    Raises ConfigError when the recording cannot be replayed.
    """

    def __init__(
        self,
        recording: Recording,
        profile: Profile | None = None,
        *,
        least: int | None = None,
        whole: Twin | None = None,
    ) -> None:
        self._recording = recording
        self._least = REPLAYED if least is None else least
        requests = recording.requests
        answered = [past for past in requests if past.tokens is not None]
        if whole is not None:
            costs, lengths = whole.costs, whole.lengths
        else:
            _check(recording)
            costs = costs_of(requests, recording.engines, profile)
            lengths = _Lengths(answered, recording.until_s)
        self.costs: dict[str, Costs] = costs
        self.lengths: _Lengths = lengths
        self.recorded, self.forecast = len(requests), len(requests) - len(answered)
        observed_s = [(past.ended_s or 0.0) - past.arrived_s for past in answered]
        self.observed_mean_s = sum(observed_s) / len(observed_s) if observed_s else math.nan
        self._is_answered = np.array([past.tokens is not None for past in requests])
        own = [lengths.likely(past) if past.tokens is None else past.tokens for past in requests]
        self._learnt = _learnt(recording, own, self.costs)
        places = repeated(recording, self._least)
        self.tokens = [own[index] for _, index in places]
        self._arrivals = [(at_s, _again(requests[index], number, at_s)) for number, (at_s, index) in enumerate(places)]
        self._deadlines_s = np.array(
            [np.inf if request.deadline_s is None else request.deadline_s for _, request in self._arrivals]
        )

    def halves(self) -> list[Twin]:
        """Twins of the first and of the second half of the recorded requests, of half the length each."""
        requests, middle = self._recording.requests, self.recorded // 2
        parts = (requests[:middle], requests[middle].arrived_s), (requests[middle:], self._recording.until_s)
        recordings = [
            msgspec.structs.replace(self._recording, requests=part, until_s=until_s) for part, until_s in parts
        ]
        return [Twin(part, least=self._least // 2, whole=self) for part in recordings]

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def present(self) -> Settings:
        """The settings in force."""
        return order_settings(tuned(self._recording.scheduling, self._recording.settings))

    def replay(self, settings: Mapping[str, str | float]) -> Outcome:
        """Serve the requests under these settings. Raises ConfigError on wrong settings."""
        recording = self._recording
        base = msgspec.structs.replace(recording.scheduling, queue_requests_max=QUEUE_REQUESTS_MAX)
        if "release" in settings:
            base = msgspec.structs.replace(base, window=None, edges=None, batch_wait_s=None)
        try:
            scheduler = tuned(base, settings).scheduler(learnt=self._learnt)
        except ValueError as error:
            raise ConfigError(f"{named(settings)}: {error}") from error
        engines = [_engine(info, self.tokens, self.costs[info.name]) for info in recording.engines]
        recorder = Recorder(len(self))
        models: list[EngineModel] = list(engines)
        with collector_paused():
            SimulatedCluster(scheduler, models, on_step=recorder).run(iter(self._arrivals))
        arrived_s, ended_s = np.array(recorder.arrived_s), np.array(recorder.ended_s)
        dated = bool(np.isfinite(self._deadlines_s).any())
        elapsed_s = elapsed(recorder)
        joules = [engine.energy_j(elapsed_s) for engine in engines]
        known = [energy_j for energy_j in joules if energy_j is not None]
        return Outcome(
            dict(settings),
            ended_s - arrived_s,
            ended_s <= self._deadlines_s if dated else None,
            sum(known) / sum(self.tokens) if len(known) == len(engines) else None,
        )

    def recorded_mean_s(self, outcome: Outcome) -> float:
        """Mean latency of an outcome's requests, of those whose real latency is in `observed_mean_s`."""
        return float(np.nanmean(outcome.latency_s[: self.recorded][self._is_answered]))

    def candidates(self) -> list[Settings]:
        """The orders, with the present settings among them, and the releases of barrier engines."""
        orders = [*ORDERS, *([self.present] if self.present not in ORDERS else [])]
        if not all(engine.barrier for engine in self._recording.engines):
            return orders
        return [*orders, *({**self.present, **settings} for settings in RELEASES)]


def repeated(recording: Recording, least: int) -> list[tuple[float, int]]:
    """(arrival, index of the request) of the recording's requests, and of copies of them up to `least` in all.

    A short recording says little about waiting: queues have no time to build up. In the copies, which are the same for
    the same recording, blocks of requests have changed places.
    """
    requests = recording.requests
    arrivals_s = np.array([past.arrived_s for past in requests])
    count = len(requests)
    gaps_s = np.diff(arrivals_s, prepend=arrivals_s[0])
    gaps_s[0] = max(0.0, recording.until_s - float(arrivals_s[-1]))  # the time after the last arrival belongs to a copy
    result = [(float(at_s), index) for index, at_s in enumerate(arrivals_s)]
    rng = np.random.default_rng(0)
    starts = np.arange(0, count, BLOCK)
    at_s = float(arrivals_s[-1])
    while len(result) < least:
        order = np.concatenate([np.arange(start, min(start + BLOCK, count)) for start in rng.permutation(starts)])
        times_s = at_s + np.cumsum(gaps_s[order])
        result += zip(times_s.tolist(), order.tolist(), strict=True)
        at_s = float(times_s[-1])
    return result[: max(least, count)]


def _engine(info: EngineInfo, tokens: Sequence[float], costs: Costs) -> StepEngine:
    return StepEngine(msgspec.structs.replace(info, paces={}), tokens, costs)


def _check(recording: Recording) -> None:
    """Raise ConfigError when the recording cannot be replayed."""
    if not recording.engines:
        raise ConfigError("the journal names no engine that is ready at its end")
    if recording.scheduling.release in PLANNED:
        raise ConfigError(f"release {recording.scheduling.release} follows plans, which a replay does not make")
    if not recording.ended:
        raise ConfigError("no request has been answered, so the speed of the engines is not known")


def _again(past: PastRequest, number: int, at_s: float) -> Request:
    """A recorded request that arrives at another time, with its deadline as long after its arrival as it was."""
    deadline_s = past.request.deadline_s
    moved_s = None if deadline_s is None else deadline_s + (at_s - past.arrived_s)
    return msgspec.structs.replace(past.request, id=number, blocks=(), deadline_s=moved_s)


class _Lengths:
    """Lengths of requests whose real lengths are not known. answered : requests with known lengths, at least one."""

    def __init__(self, answered: Sequence[PastRequest], until_s: float) -> None:
        tokens = sum([past.tokens or 0.0 for past in answered])
        seconds = sum([(past.ended_s or 0.0) - past.begun_s for past in answered])
        self._mean = tokens / len(answered)
        self._tokens_per_s = tokens / seconds if seconds > 0 else 0.0
        self._until_s = until_s

    def likely(self, past: PastRequest) -> float:
        """One of the equally likely lengths of the forecast that the answer can still have, another for each request.

        Without a forecast the mean; an answer that is longer than forecast is expected to grow by a quarter.
        """
        request = past.request
        running = past.engine and past.ended_s is None
        so_far = self._tokens_per_s * (self._until_s - past.begun_s) if running else 0.0
        lengths = request.quantiles or (request.predicted_tokens or self._mean,)
        possible = [length for length in lengths if length > so_far] or [1.25 * so_far]
        return max(1.0, possible[request.id % len(possible)])


def _learnt(recording: Recording, tokens: Sequence[float], costs: Mapping[str, Costs]) -> dict[str, Learned]:
    """What the server knew of each model: a sample of scores and lengths, and the seconds of a token."""
    by_model: dict[str, list[tuple[PastRequest, float]]] = {}
    for past, length in zip(recording.requests, tokens, strict=True):
        by_model.setdefault(past.request.model, []).append((past, length))
    learnt = {}
    for model, members in by_model.items():
        forecast = [(past.request, length) for past, length in members if past.request.quantiles][:SAMPLE]
        ran = [(past.ended_s - past.begun_s, length) for past, length in members if past.engine and past.ended_s]
        seconds, total = sum([took_s for took_s, _ in ran]), sum([length for _, length in ran])
        service = (seconds / total, total / len(ran), 64.0) if total > 0 and seconds > 0 else None
        scores = recording.scheduling.scores([request.quantiles for request, _ in forecast])
        learnt[model] = Learned(scores, tuple([length for _, length in forecast]), service)
    return learnt
