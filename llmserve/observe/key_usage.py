"""What each key uses of each model: requests, tokens, seconds of slots, joules and money.

    n       sequences that run now, on all engines
    J(t)    joules of all engines until t, measured or modelled (energy.py)
    E(t)    the integral of dJ / n over the time in which n > 0: joules of a sequence that has run from the start

A request from a to b with c answers used c (E(b) - E(a)) joules. So the requests share all joules of the times
in which any request ran. The energy of idle engines belongs to no request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from llmserve.live.journal import Step
from llmserve.observe.counters import Counter, Families
from llmserve.observe.energy import EnergyMeter
from llmserve.request import Request
from llmserve.scheduling.messages import EngineLost, EngineReady, RequestAdopted, RequestEnded, StartBatch

KEYS_MAX = 1_000  # keys with labels of their own
OTHER = "other"
COLUMNS = ("requests", "refused", "prompt_tokens", "output_tokens", "slot_seconds", "joules", "money")


class KeyUsage:
    """Counts by key and model. Must listen to the journal before the meter: then joules fall into the right span.

    models  that engines list now; rows of other models are added up as OTHER
    meter   of the energy of all engines; None: none covers all
    """

    def __init__(self, models: Callable[[], Collection[str]], families: Families) -> None:
        self.meter: EnergyMeter | None = None
        self._models = models
        self._families = {column: families.counter(f"llmserve_key_{column}") for column in COLUMNS}
        self._rows: dict[tuple[str, str], dict[str, Counter]] = {}
        self._keys: set[str] = set()
        self._running: dict[int, _Run] = {}  # by request id
        self._ran: dict[int, tuple[float, float]] = {}  # slot seconds and joules of the request's runs that have ended
        self._sequences = 0
        self._joules = self._of_each = 0.0  # J and E at the last event

    # ---- for keys (tenants/limits.py) ----

    def refused(self, key: str, model: str) -> None:
        self._row(key, model)["refused"].inc()

    def ended(
        self, key: str, model: str, request_id: int, prompt_tokens: float, output_tokens: float, money: float
    ) -> None:
        seconds, joules = self._ran.pop(request_id, (0.0, 0.0))
        values = (1.0, 0.0, prompt_tokens, output_tokens, seconds, joules, money)
        for counter, value in zip(self._row(key, model).values(), values, strict=True):
            counter.value += value

    def joules_per_token(self, model: str) -> float | None:
        """Mean joules of an output token of a model so far; None: no answer was metered."""
        rows = [row for (_, name), row in self._rows.items() if name == model]
        tokens, joules = [sum([row[name].value for row in rows]) for name in ("output_tokens", "joules")]
        return joules / tokens if self.meter is not None and tokens else None

    def _row(self, key: str, model: str) -> dict[str, Counter]:
        """The counters of a key and model. After KEYS_MAX keys, further ones share OTHER, as do unknown models."""
        if key not in self._keys:
            if len(self._keys) < KEYS_MAX:
                self._keys.add(key)
            else:
                key = OTHER
        row = self._rows.get((key, model))
        if row is None and model and model not in self._models():  # while no engine is up, clients invent names
            model = OTHER
            row = self._rows.get((key, model))
        if row is None:
            row = self._rows[key, model] = {name: family.of(key, model) for name, family in self._families.items()}
        return row

    def _keep(self, models: Collection[str]) -> None:
        """Add up the rows of all other models: new names of adapters may appear without limit."""
        for key, model in [row for row in self._rows if row[1] not in models and row[1] not in ("", OTHER)]:
            others = self._row(key, OTHER)
            for name, counter in self._rows.pop((key, model)).items():
                others[name].value += counter.value
                self._families[name].remove(key, model)

    def shown(self) -> list[dict[str, Any]]:
        """The rows, for operators, in the order of their keys and models. Without a meter they have no joules."""
        return [
            {
                "key": key,
                "model": model,
                **{name: _rounded(counter.value) for name, counter in row.items() if self.meter or name != "joules"},
            }
            for (key, model), row in sorted(self._rows.items())
        ]

    # ---- the journal ----

    def observe(self, step: Step) -> None:
        event = step.event
        starts = [action for action in step.actions if type(action) is StartBatch] if step.actions else ()
        if type(event) is RequestEnded or type(event) is EngineLost or starts:
            self._share(step.now_s)
        if type(event) is RequestEnded:
            self._end(event.request_id, event.engine, step.now_s)
        elif type(event) is EngineLost:
            for id_ in [id_ for id_, run in self._running.items() if run.engine == event.engine]:
                self._end(id_, event.engine, step.now_s)
        elif type(event) is RequestAdopted:
            self._share(step.now_s)
            self._start(event.request, event.engine.name, step.now_s)
        elif type(event) is EngineReady:  # the engine may list other models than before
            self._keep(self._models())
        for action in starts:
            for request in action.batch.requests:
                self._start(request, action.engine, step.now_s)

    def _share(self, now_s: float) -> None:
        """Bring E up to now."""
        if self.meter is not None:
            joules = self.meter.joules(now_s)
            if self._sequences:
                self._of_each += (joules - self._joules) / self._sequences
            self._joules = joules

    def _start(self, request: Request, engine: str, now_s: float) -> None:
        self._running[request.id] = _Run(engine, request.sequences, now_s, self._of_each)
        self._sequences += request.sequences

    def _end(self, request_id: int, engine: str, now_s: float) -> None:
        run = self._running.get(request_id)
        if run is None or run.engine != engine:  # an engine that was lost before
            return
        del self._running[request_id]
        self._sequences -= run.sequences
        seconds, joules = self._ran.get(request_id, (0.0, 0.0))
        self._ran[request_id] = (
            seconds + run.sequences * (now_s - run.since_s),
            joules + run.sequences * (self._of_each - run.of_each),
        )


def _rounded(value: float) -> float:
    return int(value) if value == int(value) else round(value, 6)


class _Run:
    """A request on an engine. of_each : E at the start"""

    __slots__ = ("engine", "of_each", "sequences", "since_s")

    def __init__(self, engine: str, sequences: int, since_s: float, of_each: float) -> None:
        self.engine, self.sequences, self.since_s, self.of_each = engine, sequences, since_s, of_each
