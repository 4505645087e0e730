"""The load of one model, for orders that follow it: how long requests wait, and how long they will take."""

from __future__ import annotations

import math
from collections.abc import Iterable

from llmserve.scheduling.queues import QueuedRequest

FIT_EVERY = 32  # answers between two fits of the time of prompts
CERTAIN = 3.0  # standard errors
TAIL_CHANGES = 1.25  # factor by which the wait's tail has changed when requests are sorted by it again
CALIBRATED_FROM = 32  # answers; with fewer, forecasts stand for themselves
SPREAD_LEAST = 1e-9  # relative spread of prompts, and variance of log forecasts; with less, all count as equal


class Calibration:
    """What forecasts mean: they may be too long or too short, and too extreme.

    Answers' log lengths y are regressed on their log forecasts x, by least squares: errors that are independent of the
    length make forecasts extreme, and the slope is then below 1. A factor gives the corrected forecasts the mean of the
    answers. memory : answers after which an observation's weight has fallen to a third.
    """

    def __init__(self, memory: int = 1024) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._count = self._x = self._y = self._xx = self._xy = 0.0  # sums with the same decay
        self._lengths = self._fitted = 0.0  # of answers, and of the regression for them at the time
        self._slope, self._at, self._factor = 1.0, (0.0, 0.0), 1.0

    def tokens(self, forecast: float) -> float:
        """The mean length of answers of this forecast. forecast : tokens, > 0"""
        return forecast if self._count < CALIBRATED_FROM else self._factor * self._fit(forecast)

    def _fit(self, forecast: float) -> float:
        mean_x, mean_y = self._at
        return math.exp(mean_y + self._slope * (math.log(forecast) - mean_x))

    def observe(self, forecast: float, output_tokens: float) -> None:
        """Count an answer. forecast, output_tokens : > 0"""
        keep, x, y = self._keep, math.log(forecast), math.log(output_tokens)
        self._lengths = keep * self._lengths + output_tokens
        fitted = output_tokens if self._count < CALIBRATED_FROM else self._fit(forecast)
        self._fitted = keep * self._fitted + fitted
        self._count = keep * self._count + 1.0
        self._x, self._y = keep * self._x + x, keep * self._y + y
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * y
        if self._count < CALIBRATED_FROM:
            return
        mean_x, mean_y = self._at = self._x / self._count, self._y / self._count
        spread = self._xx / self._count - mean_x * mean_x
        slope = (self._xy / self._count - mean_x * mean_y) / spread if spread > SPREAD_LEAST else 1.0
        self._slope, self._factor = min(1.0, max(0.0, slope)), self._lengths / self._fitted


class PromptTime:
    """Seconds that a slot spends on each token of a prompt, learnt from answers.

    The seconds of an answer are regressed on its tokens and on those of its prompt, with an overhead, by least squares.
    A few prompts are far longer than most: lest chance give them much time, the slope is less CERTAIN standard errors.
    memory : answers after which an observation's weight has fallen to a third.

    per_token_s  seconds a token of a prompt; 0 until the answers prove more
    tokens_mean  mean tokens of a prompt
    """

    def __init__(self, memory: int = 1024) -> None:
        self._keep = 1.0 - 1.0 / memory
        # Decayed sums of 1, of tokens, prompt tokens and seconds, and of their six products.
        self._moments = [0.0] * 10
        self._since_fit = 0
        self.per_token_s = self.tokens_mean = 0.0

    def observe(self, seconds: float, tokens: float, prompt_tokens: float) -> None:
        """Record one answer: its seconds on the engine, its tokens and those of its prompt (0: unknown)."""
        t, p, s, keep = tokens, prompt_tokens, seconds, self._keep
        observed = (1.0, t, p, s, t * t, t * p, t * s, p * p, p * s, s * s)
        self._moments = [keep * moment + value for moment, value in zip(self._moments, observed, strict=True)]
        self._since_fit += 1
        if self._since_fit == FIT_EVERY:
            self._since_fit = 0
            self._fit()

    def _fit(self) -> None:
        count, *sums = self._moments[:4]
        t, p, s = [total / count for total in sums]
        pairs = (t, t), (t, p), (t, s), (p, p), (p, s), (s, s)
        centred = [moment - count * one * other for moment, (one, other) in zip(self._moments[4:], pairs, strict=True)]
        tt, tp, ts, pp, ps, ss = centred
        self.tokens_mean = p
        spread = tt * pp - tp * tp
        if count <= 3.0 or spread <= SPREAD_LEAST * tt * pp:  # then nothing tells prompts from answers
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

    Such a wait is the work that waits at an arrival, over the slots that serve it. Every order that leaves no slot
    empty has nearly the same work, so an order that goes by this tail hardly changes it. Near capacity waits w > 0 are
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
    """What an order that follows the load knows of one model, and tells the model's waiting requests.

    waits        the tail of their wait
    calibration  what forecasts mean
    prompts      time of prompts
    work_us      likely microseconds of a slot of all waiting requests; whole, so that it returns to exactly zero
    """

    def __init__(self, waiting: Iterable[QueuedRequest] = ()) -> None:
        self.waits, self.calibration, self.prompts = WaitTail(), Calibration(), PromptTime()
        self.work_us = 0
        self.count(waiting)

    def count(self, requests: Iterable[QueuedRequest], sign: int = 1) -> None:
        """Count requests that wait from now on, or no longer. sign : -1 when they leave."""
        self.work_us += sign * sum([queued.work_us for queued in requests])

    def tell(self, requests: Iterable[QueuedRequest], slots: int, *, trusted: bool) -> None:
        """Give requests what their turns go by. slots : of the model.  trusted : whether forecasts count"""
        for queued in requests:
            queued.lengths = queued.request.quantiles if trusted else ()
            queued.slots, queued.decay_s = max(1, slots), self.waits.decay_s

    def arrive(self, queued: QueuedRequest, forecast: float | None, seconds: float, mean: float, ahead: int) -> bool:
        """Take a new request that was told its slots, before it is counted. True when the wait's tail changed.

        forecast : tokens; None without one.  seconds : a token, with the time of prompts.  mean : tokens of an answer
        ahead : requests that wait in engines
        """
        if forecast:
            queued.likely_tokens = self.calibration.tokens(forecast)
        own_s, queued.prompt_s = self.prompts.split(queued.likely_tokens, seconds, queued.request.prompt_tokens, mean)
        queued.service_s = own_s + queued.prompt_s
        changed = self.waits.observe((1e-6 * self.work_us + ahead * queued.service_mean_s) / queued.slots)
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
