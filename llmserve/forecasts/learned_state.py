"""Everything that a server has learnt: gathered for the file of --state, and taken back from it.

learners       forecasts of lengths, by model (predictor/online.py)
scheduler      scores and lengths of answers and service times by model, for the journal's header
engines        the slots of each, where llmserve finds them out, and its pace by model
prompt_tokens  tokens for each character of a prompt, by model
routes         whose each response is that engines keep (calls/origins.py)
programs       what turns of each kind of program take, and each tool
secret         key of the hashes of sessions and kinds, which are the same after a restart
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from llmserve.calls.origins import Origins
from llmserve.calls.prompt_size import PromptTokensByModel
from llmserve.engines.engine import Engine
from llmserve.forecasts.learned_parts import engines_state, header_part, restore_engine, scheduler_saving
from llmserve.forecasts.state_file import StateFile
from llmserve.scheduling.lengths import Learned
from llmserve.scheduling.programs.programs import NOTHING_LEARNT, LearntPrograms
from llmserve.scheduling.scheduler import Scheduler
from llmserve.settings.by_model import by_model
from llmserve.settings.tree import Config
from predictor.online import OnlineLearner
from predictor.process import PredictorProcess
from predictor.state import Saving, part

log = logging.getLogger("llmserve")

SECRET_BYTES = 16


@dataclass
class LearnedState:
    """The parts that learn outside the scheduler, and what the scheduler begins with.

    learners    by model; "": of every other model
    predictors  a mark of each learner's predictor, by model: what was learnt of one does not hold for another
    engines     what was learnt of each engine before the start, by name
    models      `learnt` of the journal's header
    programs    `programs` of the header
    secret      as in Calls
    """

    config: Config
    learners: dict[str, OnlineLearner]
    predictors: dict[str, str]
    engines: dict[str, Any] = field(default_factory=dict)
    prompt_tokens: PromptTokensByModel = field(default_factory=PromptTokensByModel)
    models: dict[str, Learned] = field(default_factory=dict)
    origins: Origins = field(default_factory=Origins)
    programs: LearntPrograms = NOTHING_LEARNT
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES))

    def recall(self, engine: Engine) -> None:
        """Continue from what was learnt of an engine of this name before the start."""
        restore_engine(engine, self.engines.get(engine.info.name))

    def saving(self, scheduler: Scheduler, engines: Iterable[Engine]) -> Saving:
        """Make the state of everything in slices (predictor/state.py). engines : those that the server has"""
        learners = {}
        for model, learner in self.learners.items():
            state = yield from learner.saving()
            learners[model] = {"predictor": self.predictors[model], **state}
        scheduled = yield from scheduler_saving(scheduler, self.config.scheduling, self.models)
        prompt_tokens = self.prompt_tokens.state()
        yield
        responses = yield from self.origins.saving()
        kinds = msgspec.to_builtins(scheduler.group.programs.kinds.learnt(), str_keys=True)
        yield
        tools = msgspec.to_builtins(scheduler.group.programs.tools.learnt())
        yield
        return {
            "learners": learners,
            "scheduler": scheduled,
            "engines": engines_state(engines, scheduler),
            "prompt_tokens": prompt_tokens,
            "routes": responses,
            "programs": {"kinds": kinds, "tools": tools},
            "secret": self.secret.hex(),
        }

    def restore(self, state: dict[str, Any], engines: Iterable[Engine]) -> None:
        """Continue from a state. engines : those of the start

        Raises ValueError for a state of something else; then nothing here may be used.
        """
        for model, learner in self.learners.items():
            own = part(state, "learners").get(model)
            if own is None:
                continue
            if part(own, "predictor") == self.predictors[model]:
                learner.restore(own)
            else:
                log.info(
                    "state: the learner%s starts empty, for its predictor is another", f" of {model}" * bool(model)
                )
        self.models.update(header_part(part(state, "scheduler"), self.config.scheduling))
        self.prompt_tokens.restore(part(state, "prompt_tokens"))
        self.engines = part(state, "engines")
        for engine in engines:
            self.recall(engine)
        if "routes" in state:
            self.origins.restore(state["routes"])
        if "programs" in state:
            self.programs = msgspec.convert(state["programs"], LearntPrograms, str_keys=True, strict=False)
            self.secret = bytes.fromhex(part(state, "secret"))


def learned_before(
    config: Config,
    kept: StateFile | None,
    predictors: Mapping[str, PredictorProcess],
    engines: Sequence[Engine],
) -> LearnedState:
    """The learning parts, with what was kept before. A file that cannot be used is set aside, with a warning.

    predictors : by model.
    """
    if kept is not None:
        try:
            state = kept.read()
            if state is not None:
                parts = _nothing_learnt(config, predictors)
                parts.restore(state, engines)
                return parts
        except Exception as error:  # a file must never keep a server from starting
            kept.set_aside(str(error))
    return _nothing_learnt(config, predictors)


def _nothing_learnt(config: Config, predictors: Mapping[str, PredictorProcess]) -> LearnedState:
    models = ["", *sorted(set(by_model("predictor", config.prediction.predictor)) - {""})]
    secret, keys_max = secrets.token_bytes(SECRET_BYTES), config.prediction.memory_keys
    return LearnedState(
        config,
        {model: OnlineLearner(keys_max=keys_max, learns_text=keys_max > 0, secret=secret) for model in models},
        {model: predictors[model].mark.hex() if model in predictors else "" for model in models},
    )
