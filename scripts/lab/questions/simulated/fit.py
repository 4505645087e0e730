"""The costs of an engine's steps, from the times of the tokens of streams.

All streams of an engine get their tokens from the same steps. So the time between two tokens of a stream is that of one
step, and what the step did is known from all streams: how many decoded, how long their contexts were, and which prompts
ended with it, of which the cache had a part.

    gap = a + s n + x C + sum over prompts that ended within (f + p m + b m (2 c + m - 1) / 2)

    n, C   sequences that decode, and tokens of their contexts
    c, m   tokens of a prompt that were cached, and that were not
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import nnls

from llmserve.simulation.engine_model import Costs

Row = list[float]


@dataclass(slots=True)
class Answer:
    """An answer as its client saw it. times_s : of its tokens"""

    asked_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    ended_s: float = 0.0
    ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


def fitted(conversations: Sequence[Sequence[Answer]], slots: int) -> Costs:
    """The costs with the least squared errors over all gaps between tokens, none below 0."""
    answers = [answer for own in conversations for answer in own]
    rows, gaps_s = _gaps(answers)
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    solution, _ = nnls(rows / scale, gaps_s)
    return costs_of(*(solution / scale).tolist(), slots)


def costs_of(
    step_s: float, sequence_s: float, context_s: float, prompt_s: float, token_s: float, position_s: float, slots: int
) -> Costs:
    """The costs of an engine of so many slots. Its steps grow with their sequences and contexts, and its prompts with
    their tokens and positions. All are seconds.
    """
    return Costs(
        [step_s + sequence_s * count for count in range(slots + 1)],
        [0.0] * (slots + 1),
        prompt_s,
        prefill_s_per_token=token_s,
        metered=False,
        prefill_s_per_context_token=position_s,
        step_s_per_context_token=context_s,
    )


def _gaps(answers: Sequence[Answer]) -> tuple[np.ndarray, np.ndarray]:
    """What each step did: (gaps, 6), and its seconds: (gaps,)."""
    firsts = sorted((answer.times_s[0], answer.prompt_tokens, answer.cached_tokens) for answer in answers)
    first_s = [at_s for at_s, *_ in firsts]
    begins = np.array([answer.times_s[0] for answer in answers])
    ends = np.array([answer.times_s[-1] for answer in answers])
    prompts = np.array([answer.prompt_tokens for answer in answers], dtype=float)
    rates = np.array([len(answer.times_s) / max(1e-9, answer.times_s[-1] - answer.times_s[0]) for answer in answers])
    rows: list[Row] = []
    gaps_s: list[float] = []
    for answer in answers:
        for earlier_s, later_s in zip(answer.times_s, answer.times_s[1:], strict=False):
            if later_s <= earlier_s:  # two tokens came at once: the client was late
                continue
            middle_s = (earlier_s + later_s) / 2
            decode = (begins <= middle_s) & (ends >= middle_s)
            contexts = float((prompts + rates * (middle_s - begins))[decode].sum())
            within = firsts[bisect_left(first_s, earlier_s + 1e-4) : bisect_left(first_s, later_s + 1e-4)]
            missed = [(prompt - cached, cached) for _, prompt, cached in within]
            positions = sum([tokens * (2 * cached + tokens - 1) / 2 for tokens, cached in missed])
            tokens = float(sum([tokens for tokens, _ in missed]))
            rows.append([1.0, float(decode.sum()), contexts, float(len(missed)), tokens, positions])
            gaps_s.append(later_s - earlier_s)
    return np.array(rows), np.array(gaps_s)
