"""The load of one model, for orders that follow the load: how long requests wait, and how long they will take."""

from __future__ import annotations

import math
from collections.abc import Iterable

from llmserve.scheduling.moments import SPREAD_LEAST, Moments
from llmserve.scheduling.queues.waiting import QueuedRequest

TAIL_CHANGES = 1.25  # factor by which the wait's tail has changed when requests are sorted by it again


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
    work_us      likely microseconds of a slot of all waiting requests; whole, so that it returns to exactly zero
    """

    def __init__(self, waiting: Iterable[QueuedRequest] = ()) -> None:
        self.waits, self.calibration = WaitTail(), Calibration()
        self.work_us = sum([queued.work_us for queued in waiting])

    def tell(self, requests: Iterable[QueuedRequest]) -> None:
        """Give requests the inputs of their sort keys."""
        for queued in requests:
            queued.decay_s = self.waits.decay_s

    def likely_tokens(self, forecast: float | None, mean: float) -> float:
        """The mean length of answers of this forecast. forecast : tokens; None without one. mean : of all answers"""
        return self.calibration.tokens(forecast) if forecast else mean

    def arrive(self, queued: QueuedRequest, ahead: int, slots: int) -> bool:
        """Learn from a new request, before it is counted. True when the tail of the wait changed.

        ahead : requests that wait in engines.  slots : of the model
        """
        queued.pace_s = queued.service_mean_s / max(1, slots)
        changed = self.waits.observe(1e-6 * self.work_us / max(1, slots) + ahead * queued.pace_s)
        queued.decay_s = self.waits.decay_s
        return changed

    def answered(self, queued: QueuedRequest, output_tokens: float) -> None:
        """Learn from an answer."""
        if output_tokens > 0 and (forecast := queued.request.expected_tokens):
            self.calibration.observe(forecast, output_tokens)
