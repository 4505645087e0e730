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

from typing import NamedTuple

from llmserve.scheduling.moments import SPREAD_LEAST, Moments, least_squares

CERTAIN = 3.0  # standard errors
TOKENS, COMPUTED, POSITIONS, SECONDS = range(4)  # the quantities of an answer


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
    their positions, with an overhead, by least squares. Of a stream the seconds to its first token are the best answer:
    they have no other tokens' time in them. A few prompts are far longer than most: lest chance give them much time,
    the slope is less CERTAIN standard errors. Positions count once theirs is above 0 with that certainty.
    memory : answers after which an observation's weight has fallen to a third.

    per_token_s     seconds a token of a prompt; 0 until the answers prove more, and while they do not
    proven_s        the last per_token_s above 0; 0: never yet
    per_position_s  seconds more a token for each position before it; likewise
    mean_s          mean seconds of a prompt, by these
    """

    def __init__(self, memory: int = 1024) -> None:
        self._moments = Moments(memory)  # of tokens, computed tokens, their positions, and seconds
        self.per_token_s = self.per_position_s = self.mean_s = self.proven_s = 0.0

    def observe(self, seconds: float, tokens: float, prompt_tokens: float, cached_tokens: float = 0.0) -> None:
        """Record an answer, or the beginning of one: its seconds on the engine, its tokens by then, and the tokens of
        its prompt (0: unknown), of which the engine had some in its cache.
        """
        computed = prompt_tokens - cached_tokens if cached_tokens < prompt_tokens else 0.0
        if self._moments.observe(tokens, computed, _positions(prompt_tokens, computed), seconds):
            self._regress()

    def prefill_s(self, prompt_tokens: float, cached_tokens: float = 0.0) -> float:
        """Seconds of a prompt."""
        if not self.per_token_s:
            return 0.0
        computed = prompt_tokens - cached_tokens if cached_tokens < prompt_tokens else 0.0
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
        _, computed_mean, positions_mean, _ = self._moments.means
        self.per_token_s, self.per_position_s = self._slopes()
        self.proven_s = self.per_token_s or self.proven_s
        self.mean_s = self.per_token_s * computed_mean + self.per_position_s * positions_mean

    def _slopes(self) -> tuple[float, float]:
        """Seconds of a computed token, and for each of its positions, as far as they are proven."""
        tokens = [TOKENS] if self._moments.products[TOKENS][TOKENS] > SPREAD_LEAST * self._moments.count else []
        alone = least_squares(self._moments, [*tokens, COMPUTED], SECONDS)
        per_token_s = 0.0 if alone is None else alone[0][-1] - CERTAIN * alone[1][-1]
        if per_token_s <= 0.0:
            return 0.0, 0.0
        both = least_squares(self._moments, [*tokens, COMPUTED, POSITIONS], SECONDS)
        if both is not None:
            slopes, errors = both
            per_position_s = slopes[-1] - CERTAIN * errors[-1]
            if min(slopes[-2], per_position_s) > 0.0:
                return slopes[-2], per_position_s
        return per_token_s, 0.0


def _positions(prompt_tokens: float, computed: float) -> float:
    """Sum of the positions of the last `computed` tokens of a prompt."""
    return computed * (prompt_tokens - 0.5 * computed)
