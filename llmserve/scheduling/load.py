"""The load of one model, for orders that follow the load: how long requests wait, and how long they will take."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from llmserve.scheduling.queues.waiting import QueuedRequest
from llmserve.scheduling.rates import ServiceTime

FIT_EVERY = 32  # answers between two regressions; until the first, forecasts stay as they are and prompts are free
CERTAIN = 3.0  # standard errors
TAIL_CHANGES = 1.25  # factor by which the wait's tail has changed when requests are sorted by it again
SPREAD_LEAST = 1e-9  # relative spread of prompts, and variance of log forecasts; below this, all count as equal


class Moments:
    """Means and centred products of quantities of answers, whose weights decay.

    FIT_EVERY answers are added at once; single additions would cost most of the time spent on an answer.
    memory : answers after which an observation's weight has fallen to a third.

    count     weight of all added answers
    means     of each quantity
    products  (quantities, quantities) sums of the products of the differences from the means
    """

    def __init__(self, memory: int) -> None:
        self._weights = (1.0 - 1.0 / memory) ** np.arange(FIT_EVERY, -1.0, -1.0)  # of the sums, then of each answer
        self._new: list[tuple[float, ...]] = []
        self._sums = np.zeros(1)  # (1 + quantities, 1 + quantities) products; the first quantity is one
        self.count = 0.0
        self.means: list[float] = []
        self.products: list[list[float]] = []

    def observe(self, *quantities: float) -> bool:
        """Count an answer. True when `count`, `means` and `products` have changed."""
        self._new.append((1.0, *quantities))
        if len(self._new) < FIT_EVERY:
            return False
        rows, self._new = np.array(self._new), []
        sums = self._sums = self._weights[0] * self._sums + (self._weights[1:] * rows.T) @ rows
        means = sums[0, 1:] / sums[0, 0]
        self.count, self.means = float(sums[0, 0]), means.tolist()
        self.products = (sums[1:, 1:] - sums[0, 0] * means[:, None] * means).tolist()
        return True


class Calibration:
    """The mean lengths of answers, by forecast: forecasts may be too long or too short, and too extreme.

    Answers' log lengths y are regressed on their log forecasts x, by least squares: errors that are independent of the
    length make forecasts extreme, and the slope is then below 1. A factor gives the corrected forecasts the mean of the
    answers. memory : answers after which an observation's weight has fallen to a third.
    """

    def __init__(self, memory: int = 1024) -> None:
        self._moments = Moments(memory)  # of x, y, the answer's length, and the regression for it at the time
        self._slope, self._scale, self._factor = 1.0, 1.0, 1.0

    def tokens(self, forecast: float) -> float:
        """The mean length of answers of this forecast. forecast : tokens, > 0"""
        return self._factor * self._fit(forecast) if self._moments.count else forecast

    def _fit(self, forecast: float) -> float:
        return self._scale * math.exp(self._slope * math.log(forecast))

    def observe(self, forecast: float, output_tokens: float) -> None:
        """Count an answer. forecast, output_tokens : > 0"""
        moments, fitted = self._moments, self._fit(forecast) if self._moments.count else output_tokens
        if not moments.observe(math.log(forecast), math.log(output_tokens), output_tokens, fitted):
            return
        mean_x, mean_y, lengths, fitted = moments.means
        xx, xy = moments.products[0][:2]
        self._slope = min(1.0, max(0.0, xy / xx)) if xx > SPREAD_LEAST * moments.count else 1.0
        self._scale, self._factor = math.exp(mean_y - self._slope * mean_x), lengths / fitted


class PromptTime:
    """Seconds that a slot spends on each token of a prompt, learned from answers.

    The seconds of an answer are regressed on the tokens of answer and prompt, with an overhead, by least squares.
    A few prompts are far longer than most: lest chance give them much time, the slope is less CERTAIN standard errors.
    memory : answers after which an observation's weight has fallen to a third.

    per_token_s  seconds a token of a prompt; 0 until the answers prove more
    tokens_mean  mean tokens of a prompt
    """

    def __init__(self, memory: int = 1024) -> None:
        self._moments = Moments(memory)  # of tokens, prompt tokens and seconds
        self.per_token_s = self.tokens_mean = 0.0

    def observe(self, seconds: float, tokens: float, prompt_tokens: float) -> None:
        """Record one answer: its seconds on the engine, its tokens and those of its prompt (0: unknown)."""
        if self._moments.observe(tokens, prompt_tokens, seconds):
            self._regress()

    def _regress(self) -> None:
        count, (_, self.tokens_mean, _) = self._moments.count, self._moments.means
        (tt, tp, ts), (_, pp, ps), (*_, ss) = self._moments.products
        tt, pp = max(0.0, tt), max(0.0, pp)  # of equal numbers, rounding may make them negative
        spread = tt * pp - tp * tp
        if spread <= SPREAD_LEAST * tt * pp:  # then nothing tells prompts from answers
            self.per_token_s = 0.0
            return
        slope, slope_of_answer = (tt * ps - tp * ts) / spread, (pp * ts - tp * ps) / spread
        noise = max(0.0, ss - slope_of_answer * ts - slope * ps) / (count - 3.0)
        self.per_token_s = max(0.0, slope - CERTAIN * math.sqrt(noise * tt / spread))

    def split(self, tokens: float, seconds: float, prompt_tokens: float, mean: float) -> tuple[float, float]:
        """Seconds of an answer of `tokens` without its prompt, and of the prompt.

        seconds : a token of answers, with the time of their prompts.  mean : tokens of an answer
        """
        of_prompts = self.per_token_s * self.tokens_mean / mean if self.per_token_s else 0.0  # part of `seconds`
        return tokens * max(0.0, seconds - of_prompts), self.per_token_s * prompt_tokens


class WaitTail:
    """The decay of the tail of the wait, if requests were served first come, first served.

    Such a wait is the waiting work at an arrival, over the slots. The work is nearly the same under every order that
    leaves no slot empty, so an order that goes by this tail hardly changes the tail. Near capacity waits w > 0 are
    exponential (Kingman), and then E[w²] / (2 E[w]) is their mean, however many requests need not wait; the squares
    give most weight to the long waits.

    memory   arrivals after which an observation's weight has fallen to a third
    decay_s  seconds of waiting by which the tail falls by a factor e; 0 while no request has had to wait. It follows
             the measurement in steps of TAIL_CHANGES, for requests are sorted by it
    """

    def __init__(self, memory: int = 1024) -> None:
        self._keep = 1.0 - 1.0 / memory
        self.decay_s = 0.0
        self._waits_s = self._squares_s2 = 0.0  # sums of w and w², with the same decay

    def observe(self, wait_s: float) -> bool:
        """Count an arrival. wait_s : w, >= 0. True when decay_s changed."""
        self._waits_s = self._keep * self._waits_s + wait_s
        self._squares_s2 = self._keep * self._squares_s2 + wait_s * wait_s
        if self._waits_s <= 0.0:
            return False
        measured_s = self._squares_s2 / (2.0 * self._waits_s)
        if measured_s <= TAIL_CHANGES * self.decay_s and self.decay_s <= TAIL_CHANGES * measured_s:
            return False
        self.decay_s = measured_s
        return True


class Load:
    """The load of one model, from which an order gets the sort keys of waiting requests.

    waits        the tail of the wait
    calibration  what forecasts mean
    prompts      time of prompts
    work_us      likely microseconds of a slot of all waiting requests; whole, so that it returns to exactly zero
    """

    def __init__(self, waiting: Iterable[QueuedRequest] = ()) -> None:
        self.waits, self.calibration, self.prompts = WaitTail(), Calibration(), PromptTime()
        self.work_us = sum([queued.work_us for queued in waiting])

    def tell(self, requests: Iterable[QueuedRequest]) -> None:
        """Give requests the inputs of their sort keys."""
        for queued in requests:
            queued.decay_s = self.waits.decay_s

    def arrive(
        self, queued: QueuedRequest, forecast: float | None, service: ServiceTime, ahead: int, slots: int
    ) -> bool:
        """Learn from a new request, before it is counted. True when the tail of the wait changed.

        forecast : tokens; None without one.  service : times of answers, with those of their prompts
        ahead : requests that wait in engines.  slots : of the model
        """
        if forecast:
            queued.likely_tokens = self.calibration.tokens(forecast)
        own_s, queued.prompt_s = self.prompts.split(
            queued.likely_tokens, service.seconds_per_token, queued.request.prompt_tokens, service.tokens_mean
        )
        queued.service_s = own_s + queued.prompt_s
        queued.pace_s = queued.service_mean_s / max(1, slots)
        changed = self.waits.observe(1e-6 * self.work_us / max(1, slots) + ahead * queued.pace_s)
        queued.decay_s = self.waits.decay_s
        return changed

    def expect(self, queued: QueuedRequest, tokens: float) -> None:
        """Give a waiting request another forecast."""
        self.work_us -= queued.work_us
        queued.expect(tokens, self.calibration.tokens(tokens))
        self.work_us += queued.work_us

    def answered(self, queued: QueuedRequest, output_tokens: float, ran_s: float) -> None:
        """Learn from an answer."""
        if output_tokens > 0 and (forecast := queued.request.expected_tokens):
            self.calibration.observe(forecast, output_tokens)
            self.prompts.observe(ran_s, output_tokens, queued.request.prompt_tokens)
