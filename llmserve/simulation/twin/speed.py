"""How fast an engine is, fitted to the answers of the past.

An answer of t tokens to a prompt of p tokens, beside n - 1 others, takes d + c p + t (a + b n) seconds. The four
numbers are at least 0 and fit by least squares; each residual is weighted by one over its seconds' square root, for
longer answers vary more. Where n hardly varied, b is not known and tends to 0: a step then takes the same time for
any n. A batch of a barrier engine counts as one answer: its longest, to all its prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bins.profile import Profile
from llmserve.errors import ConfigError
from llmserve.request import EngineInfo
from llmserve.simulation.engine_model import Costs
from llmserve.simulation.twin.past import PastRequest

ENOUGH = 20  # answers; an engine with fewer has the speed of all engines of its kind together
STEP_LEAST_S = 1e-9
RIDGE = 0.03  # weight, over that of all answers, of the expectation that b is 0


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, or a batch of a barrier engine. running : mean number of requests on the engine meanwhile."""

    tokens: float
    prompt_tokens: float
    running: float
    seconds: float


def answers_of(requests: Sequence[PastRequest], engine: EngineInfo) -> list[Answered]:
    """The answers of an engine, without those whose length or time is not known."""
    own = [
        (past, past.tokens, past.ended_s)
        for past in requests
        if past.engine == engine.name and past.tokens is not None and past.ended_s is not None
    ]
    if not engine.barrier:
        return [
            Answered(tokens, past.request.prompt_tokens, past.running, ended_s - past.begun_s)
            for past, tokens, ended_s in own
            if ended_s > past.begun_s
        ]
    batches: dict[int, list[tuple[PastRequest, float, float]]] = {}
    for answer in own:
        batches.setdefault(answer[0].batch_id, []).append(answer)
    return [
        Answered(
            max([tokens for _, tokens, _ in batch]),
            sum([past.request.prompt_tokens for past, *_ in batch]),
            float(len(batch)),
            max([ended_s for *_, ended_s in batch]) - batch[0][0].begun_s,
        )
        for batch in batches.values()
        if max([ended_s for *_, ended_s in batch]) > batch[0][0].begun_s
    ]


def fitted(answers: Sequence[Answered]) -> tuple[float, float, float, float]:
    """(d, c, a, b) of the module's formula. answers : at least one."""
    rows = np.array([[1.0, each.prompt_tokens, each.tokens, each.tokens * each.running] for each in answers])
    seconds = np.array([each.seconds for each in answers])
    weights = 1.0 / np.sqrt(seconds)
    rows *= weights[:, None]
    small = np.array([[0.0, 0.0, 0.0, RIDGE * np.linalg.norm(rows[:, 3])]])
    d, c, a, b = _at_least_zero(np.vstack([rows, small]), np.append(seconds * weights, 0.0)).tolist()
    return d, c, a, b


def _at_least_zero(rows: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares; the most negative coefficient is fixed at 0 until none is negative. rows : (n, k). Returns (k,)"""
    scale = np.sqrt((rows**2).sum(axis=0))
    kept = np.flatnonzero(scale)
    while True:
        solution: NDArray[np.float64] = np.zeros(rows.shape[1])
        solution[kept] = np.linalg.lstsq(rows[:, kept] / scale[kept], values, rcond=None)[0]
        if (solution >= 0).all():
            break
        kept = kept[kept != solution.argmin()]
    solution[kept] /= scale[kept]
    return solution


def costs_of(
    requests: Sequence[PastRequest], engines: Sequence[EngineInfo], profile: Profile | None = None
) -> dict[str, Costs]:
    """The costs of each engine, by name. profile : for the power of the engines; None: it is not known.

    Raises ConfigError when no ready engine has answered a request.
    """
    own = {engine.name: answers_of(requests, engine) for engine in engines}
    costs = {}
    for engine in engines:
        alike = [other.name for other in engines if (other.barrier, other.slots) == (engine.barrier, engine.slots)]
        answers = own[engine.name]
        if len(answers) < ENOUGH:
            answers = [answer for name in alike for answer in own[name]] or [
                answer for answers in own.values() for answer in answers
            ]
        if not answers:
            raise ConfigError("no ready engine has answered a request, so the speed of the engines is not known")
        costs[engine.name] = _costs(fitted(answers), engine.slots, profile)
    return costs


def _costs(fit: tuple[float, float, float, float], slots: int, profile: Profile | None) -> Costs:
    prefill_s, prefill_s_per_token, step_s, step_s_more = fit
    if profile is None:
        power_w, prefill_j, idle_w = [0.0] * (slots + 1), 0.0, 0.0
    else:
        power_w = [0.0, *profile.power_w(np.arange(1, slots + 1)).tolist()]
        prefill_j, idle_w = profile.prefill_j, profile.idle_w
    return Costs(
        [max(STEP_LEAST_S, step_s + step_s_more * count) for count in range(slots + 1)],
        power_w,
        prefill_s,
        prefill_j,
        prefill_s_per_token,
        idle_w,
        metered=profile is not None,
    )
