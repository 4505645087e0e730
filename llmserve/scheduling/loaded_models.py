"""The models in the memory of an engine that holds only few at once, and how long such an engine takes to load one.

The engine loads a model when a request needs the model, and drops another one for it (Ollama, llama-swap). So the
requests that start there tell which models it has, and how long a load takes:

    lead    seconds from the start of a run to the first token of the answer. Where the answer did not come as a stream,
            the seconds of the run less those of the answer's tokens
    load_s  mean lead of the runs that began a load, less that of runs of the model that began alone without one
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from statistics import fmean

LOADS_KEPT = 4  # loads after which an observation's weight has fallen to a third: files move into the system's cache
LEADS_KEPT = 16


class Mean:
    """A mean of observations; the first `kept` have equal weight, and older ones decay. value : at the start"""

    __slots__ = ("_count", "_kept", "value")

    def __init__(self, kept: int, value: float | None = None) -> None:
        self._kept, self._count = kept, 0 if value is None else 1
        self.value = value or 0.0

    def observe(self, value: float) -> None:
        self._count = min(self._count + 1, self._kept)
        self.value += (value - self.value) / self._count


class LoadedModels:
    """The models in an engine's memory, in the order of their last use.

    at_once : models that fit.  before : load_s of models from before the start
    """

    __slots__ = ("_began_s", "_leads", "_loads", "_models", "_told", "at_once")

    def __init__(self, before: Mapping[str, float]) -> None:
        self.at_once = 1
        self._told: Collection[str] | None = None
        self._models: dict[str, None] = {}
        self._began_s: dict[str, float] = {}  # when loads began that have not ended, by model
        self._loads = {model: Mean(LOADS_KEPT, seconds) for model, seconds in before.items()}
        self._leads: dict[str, Mean] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __contains__(self, model: object) -> bool:
        return model in self._models

    def told(self, models: Collection[str] | None, *, idle: bool) -> None:
        """Take the engine's word for which models it has: once, for later the word may be out of date, and if it runs
        nothing. None: the engine does not say
        """
        if models is not None and idle and models != self._told:
            known = [model for model in self._models if model in models]
            self._models = dict.fromkeys([*known, *models])
            self._began_s.clear()
        self._told = models

    def forget(self) -> None:
        """Note that nothing is in the memory any more."""
        self._models.clear()
        self._began_s.clear()

    def use(self, model: str, running: Collection[str], now_s: float) -> bool:
        """Note that a request of the model starts beside requests of other models. True while the model is loaded."""
        if model not in self._models:
            for other in [other for other in self._models if other not in running]:
                if len(self._models) >= self.at_once:
                    self._drop(other)
            self._began_s[model] = now_s
        self._models.pop(model, None)
        self._models[model] = None
        return model in self._began_s

    def _drop(self, model: str) -> None:
        del self._models[model]
        self._began_s.pop(model, None)

    def keep_loading(self, models: Collection[str]) -> None:
        """Time the loads of these models only: for the others, no run waits any more."""
        if self._began_s:
            self._began_s = {model: at_s for model, at_s in self._began_s.items() if model in models}

    def answered(self, model: str, lead_s: float) -> None:
        """Learn from a run that had the engine for itself, and waited for no load. lead_s : until its first token"""
        self._leads.setdefault(model, Mean(LEADS_KEPT)).observe(max(0.0, lead_s))

    def answered_after_load(self, model: str, lead_s: float, first_s: float) -> float:
        """Learn from a run that waited for a load. Returns the seconds of the load within the run.

        first_s : time of the first token.  lead_s : until then
        """
        began_s, leads = self._began_s.pop(model, None), self._leads.get(model)
        if began_s is not None:
            self._loads.setdefault(model, Mean(LOADS_KEPT)).observe(max(0.0, first_s - began_s))
        return max(0.0, lead_s - (leads.value if leads is not None else 0.0))

    @property
    def loads_s(self) -> dict[str, float]:
        """The seconds of a load, by model, as far as loads have been seen."""
        return {model: self._load_s(model) for model in self._loads}

    def load_s(self, model: str) -> float:
        """Seconds of a load of the model; of a model that has not been loaded yet, as of the others; 0: none has."""
        if model in self._loads:
            return self._load_s(model)
        return fmean([self._load_s(other) for other in self._loads]) if self._loads else 0.0

    def _load_s(self, model: str) -> float:
        leads = self._leads.get(model)
        return max(0.0, self._loads[model].value - (leads.value if leads is not None else 0.0))
