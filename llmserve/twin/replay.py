"""Replays a recording under other settings: the simulated cluster drives the very scheduler (llmserve/policies.py)."""

from __future__ import annotations

import gc
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from bins.profile import Profile
from llmserve.cluster.simulated import EngineModel, SimulatedCluster
from llmserve.errors import ConfigError
from llmserve.policies import PLANNED, Settings, named, order_settings, tuned
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.lengths import Learnt
from llmserve.simulation.engine_model import Costs, StepEngine
from llmserve.simulation.report import Recorder, elapsed
from llmserve.twin.past import PastRequest, Recording
from llmserve.twin.speed import costs_of

QUEUE_REQUESTS_MAX = 10**9  # a replay refuses no request: all candidates serve the same ones
SAMPLE = 1_024  # forecasts that the first bin edges are fitted to
FIRST_COME: Settings = {"order": "fffs"}
PATIENCES = (3.0, 6.0, 12.0, 20.0, 30.0, 40.0, 60.0, 90.0, 120.0, 200.0, 400.0)
ORDERS: list[Settings] = [FIRST_COME, *[Settings(order="shortest", patience=patience) for patience in PATIENCES]]
"""Candidates that a server may change to while it serves."""
RESTARTS: list[Settings] = [
    *[Settings(release="greedy", bins=bins) for bins in (1, 4, 8)],
    Settings(release="window", bins=1),
]
"""Candidates for engines that run batches to their end; a change needs a restart."""


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

    costs       of each engine, by name
    observed_mean_s  mean latency of the recorded answers
    forecast    number of requests whose real lengths are not known; they get one of their forecast's lengths
    Raises ConfigError when the recording cannot be replayed.
    """

    def __init__(self, recording: Recording, profile: Profile | None = None) -> None:
        if not recording.engines:
            raise ConfigError("the journal names no engine that is ready at its end")
        if recording.scheduling.release in PLANNED:
            raise ConfigError(f"release {recording.scheduling.release} follows plans, which a replay does not make")
        try:
            self.costs = costs_of(recording.requests, recording.engines, profile)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._recording = recording
        mean_tokens = float(np.mean([past.tokens for past in recording.requests if past.tokens is not None]))
        self.tokens = [
            past.tokens if past.tokens is not None else _likely(past.request, mean_tokens)
            for past in recording.requests
        ]
        self.observed_mean_s = float(
            np.mean([past.ended_s - past.arrived_s for past in recording.requests if past.ended_s and past.tokens])
        )
        self.forecast = len(recording.requests) - recording.ended
        self._arrivals = [
            (past.arrived_s, msgspec.structs.replace(past.request, id=number, prefixes=()))
            for number, past in enumerate(recording.requests)
        ]
        self._deadlines_s = np.array(
            [np.inf if request.deadline_s is None else request.deadline_s for _, request in self._arrivals]
        )
        self._learnt = _learnt(recording, self.tokens, self.costs)

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def present(self) -> Settings:
        """The settings in force."""
        return order_settings(tuned(self._recording.scheduling, self._recording.settings))

    def replay(self, settings: Mapping[str, str | float]) -> Outcome:
        """Serve the recorded requests under these settings. Raises ConfigError on wrong settings."""
        recording = self._recording
        base = msgspec.structs.replace(recording.scheduling, queue_requests_max=QUEUE_REQUESTS_MAX)
        if "release" in settings:
            base = msgspec.structs.replace(base, window=None, edges=None, batch_wait_s=None)
        try:
            scheduler = tuned(base, settings).scheduler(plan=recording.groups, learnt=self._learnt)
        except ValueError as error:
            raise ConfigError(f"{named(settings)}: {error}") from error
        engines = [_engine(info, self.tokens, self.costs[info.name]) for info in recording.engines]
        recorder = Recorder(len(self))
        models: list[EngineModel] = list(engines)
        with _collector_paused():
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

    def candidates(self) -> list[Settings]:
        """The candidates that a server can change to while it serves, the present settings among them."""
        return [*ORDERS, *([self.present] if self.present not in ORDERS else [])]

    def restarts(self) -> list[Settings]:
        """Further candidates, for which the server would have to start again."""
        if not all(engine.barrier for engine in self._recording.engines):
            return []
        return [{**self.present, **settings} for settings in RESTARTS]


def _engine(info: EngineInfo, tokens: Sequence[float], costs: Costs) -> StepEngine:
    return StepEngine(msgspec.structs.replace(info, paces={}), tokens, costs)


def _likely(request: Request, mean_tokens: float) -> float:
    """One of the equally likely lengths of a forecast, another for each request; without a forecast the mean."""
    if request.quantiles:
        return max(1.0, request.quantiles[request.id % len(request.quantiles)])
    return max(1.0, request.predicted_tokens or mean_tokens)


def _learnt(recording: Recording, tokens: Sequence[float], costs: Mapping[str, Costs]) -> dict[str, Learnt]:
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
        learnt[model] = Learnt(scores, tuple([length for _, length in forecast]), service)
    return learnt


@contextmanager
def _collector_paused() -> Generator[None, None, None]:
    """Pause the garbage collector: a replay creates no cycles, but each collection would scan all waiting requests."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
