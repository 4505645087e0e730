"""Work: the seconds of a slot that a request takes, for its prompt and for its answer.

    work        prefill + answer
    prefill     a (p - h) + b (p^2 - h^2) / 2
    answer      tokens of the answer by forecast, at the seconds of a token without those of the prompts

    p   tokens of the prompt.  h : tokens of it that the engine has in its cache, which it need not compute
    a   seconds a token at the beginning of a prompt.  b : seconds more for each position, as attention grows with it

What orders sort by, what an engine costs a request, when a prompt is long, when requests start and end, and how many
engines are wanted: all ask `PromptTime`. It gives a prompt no time that the answers do not prove.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from llmserve.scheduling.moments import SPREAD_LEAST, Moments

CERTAIN = 3.0  # standard errors


class Work(NamedTuple):
    """The seconds of a slot that a request takes. answer_s : without the prompt.  prompt_s : of the prompt"""

    answer_s: float
    prompt_s: float

    @property
    def seconds(self) -> float:
        return self.answer_s + self.prompt_s


class PromptTime:
    """Seconds that a slot spends on a prompt, learned from answers.

    The seconds of an answer are regressed on its tokens, the tokens of the prompt that were computed, and the sum of
    their positions, with an overhead, by least squares. A few prompts are far longer than most: lest chance give them
    much time, the slope is less CERTAIN standard errors. Positions count once theirs is above 0 with that certainty.
    memory : answers after which an observation's weight has fallen to a third.

    per_token_s     seconds a token of a prompt; 0 until the answers prove more
    per_position_s  seconds more a token for each position before it; likewise
    mean_s          mean seconds of a prompt, by these
    """

    def __init__(self, memory: int = 1024) -> None:
        self._moments = Moments(memory)  # of tokens, computed tokens, their positions, and seconds
        self.per_token_s = self.per_position_s = self.mean_s = 0.0

    def observe(self, seconds: float, tokens: float, prompt_tokens: float, cached_tokens: float = 0.0) -> None:
        """Record one answer: its seconds on the engine, its tokens and those of its prompt (0: unknown), of which the
        engine had some in its cache.
        """
        computed = _computed(prompt_tokens, cached_tokens)
        if self._moments.observe(tokens, computed, _positions(prompt_tokens, computed), seconds):
            self._regress()

    def prefill_s(self, prompt_tokens: float, cached_tokens: float = 0.0) -> float:
        """Seconds of a prompt."""
        computed = _computed(prompt_tokens, cached_tokens)
        return self.per_token_s * computed + self.per_position_s * _positions(prompt_tokens, computed)

    def work(
        self, tokens: float, prompt_tokens: float, cached_tokens: float, seconds: float, tokens_mean: float
    ) -> Work:
        """The work of a request with an answer of `tokens`.

        seconds : a token of answers, with the time of their prompts.  tokens_mean : of an answer
        """
        of_prompts = self.mean_s / tokens_mean if self.mean_s else 0.0  # part of `seconds`
        return Work(tokens * max(0.0, seconds - of_prompts), self.prefill_s(prompt_tokens, cached_tokens))

    def _regress(self) -> None:
        moments = self._moments
        _, computed_mean, positions_mean, _ = moments.means
        self.per_token_s, self.per_position_s = _slopes(moments) or (_slope(moments), 0.0)
        self.mean_s = self.per_token_s * computed_mean + self.per_position_s * positions_mean


def _computed(prompt_tokens: float, cached_tokens: float) -> float:
    return max(0.0, prompt_tokens - cached_tokens)


def _positions(prompt_tokens: float, computed: float) -> float:
    """Sum of the positions of the last `computed` tokens of a prompt."""
    return computed * (prompt_tokens - 0.5 * computed)


def _slope(moments: Moments) -> float:
    """Least seconds a computed token, if its position does not matter."""
    (tt, tp, _, ts), (_, pp, _, ps), _, (*_, ss) = moments.products
    tt, pp = max(0.0, tt), max(0.0, pp)  # of equal numbers, rounding may make them negative
    spread = tt * pp - tp * tp
    if spread <= SPREAD_LEAST * tt * pp:  # then nothing tells prompts from answers
        return 0.0
    slope, slope_of_answer = (tt * ps - tp * ts) / spread, (pp * ts - tp * ps) / spread
    noise = max(0.0, ss - slope_of_answer * ts - slope * ps) / (moments.count - 3.0)
    return max(0.0, slope - CERTAIN * math.sqrt(noise * tt / spread))


def _slopes(moments: Moments) -> tuple[float, float] | None:
    """Seconds a computed token, and least seconds for each position; None unless both are proven."""
    products = np.array(moments.products)
    spreads = np.sqrt(np.maximum(0.0, np.diag(products)))[:3]
    if not spreads.all():
        return None
    shapes = products[:3, :3] / np.outer(spreads, spreads)
    if np.linalg.det(shapes) <= SPREAD_LEAST:
        return None
    inverse, with_seconds = np.linalg.inv(shapes), products[:3, 3] / spreads
    slopes = inverse @ with_seconds
    noise = max(0.0, float(products[3, 3] - slopes @ with_seconds)) / (moments.count - 4.0)
    per_token, per_position = float(slopes[1]), float(slopes[2]) - CERTAIN * math.sqrt(noise * float(inverse[2, 2]))
    if min(per_token, per_position) <= 0.0:
        return None
    return float(per_token / spreads[1]), float(per_position / spreads[2])
