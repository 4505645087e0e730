"""The load of one model, for orders that follow the load: how long requests wait, and how long they will take."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from llmserve.scheduling.moments import FIT_EVERY, SPREAD_LEAST, Moments
from llmserve.scheduling.queues.waiting import NO_ROOM, Amount, QueuedRequest, Room

ROOM_CHANGES, LONGEST_CHANGES = 1.5, 1.1  # factors by which these have changed when requests are sorted by them again
TAIL = 0.01  # part of the requests that is beyond the 99th percentile
SPENT = TAIL / 2  # part of the requests that may wait until last; the other half is left to chance
LONGEST = 2.2  # of the longest wait of first come, first served: what the longest requests are to wait at most
LONG_LEAST = 2.0  # of the mean: what shorter requests take is too little to be worth their wait
MARGIN = 0.1  # of the tail, which a delay may always use: the 99th percentile may be 1.1 of first come, first served's
SLOPE_MOST = 2.0
SLOPE_SURE, SHARE_SURE = 2.0, 64.0  # the slope 1 beforehand, as a sum of squares of x; the share 1, as answers
EDGES_PER_E = 30.0  # edges of a histogram for a factor of e
LOG_LEAST, LOG_MOST = -14.0, 21.0  # logarithms of the first and the last edge: a microsecond, forty years


class Calibration:
    """The mean lengths of answers, by forecast: forecasts may be too long or too short, and too extreme.

    Answers' log lengths y are regressed on their log forecasts x, by least squares: errors that are independent of the
    length make forecasts extreme, and the slope is then below 1. Forecasts of a learner that has seen few answers are
    close together, and the slope is above 1. A factor gives the corrected forecasts the mean of the answers.

    Ranks can be right for nearly all answers, and the few longest, which take much of the time, still be forecast as
    short. So the forecasts are judged by tokens, too: by how much longer the answers were that were forecast above the
    mean than those below it, over the difference that was forecast. All forecasts are drawn to the mean by this share,
    at most 1; at 0 they say nothing.

    Beforehand the forecasts are right: slope and share are 1, as if that had been seen of some answers. While forecasts
    are learnt, the early ones say little of the present ones, so the later an answer, the more it counts.

    memory : answers after which an observation's weight has fallen to a third.
    """

    def __init__(self, memory: int = 1024) -> None:
        # Of x, y, the answer's length, the regression for it at the time, whether this was above the mean, and the last
        # three multiplied by that.
        self._moments = Moments(memory, youth=2.0)
        self._slope, self._scale, self._factor = 1.0, 1.0, 1.0
        self._mean, self._share = math.inf, 1.0

    def tokens(self, forecast: float) -> float:
        """The mean length of answers of this forecast. forecast : tokens, > 0"""
        if not self._moments.count:
            return forecast
        return self._mean + self._share * (self._factor * self._fit(forecast) - self._mean)

    def _fit(self, forecast: float) -> float:
        return self._scale * math.exp(self._slope * math.log(forecast))

    def observe(self, forecast: float, output_tokens: float) -> bool:
        """Count an answer. forecast, output_tokens : > 0. True when this made the first regression."""
        moments, first = self._moments, not self._moments.count
        fitted = output_tokens if first else self._fit(forecast)
        above = float(self._factor * fitted > self._mean)
        quantities = (math.log(forecast), math.log(output_tokens), output_tokens, fitted, above)
        if not moments.observe(*quantities, above * output_tokens, above * fitted):
            return False
        mean_x, mean_y, lengths, fitted, above, lengths_above, fitted_above = moments.means
        xx, xy = moments.products[0][:2]
        self._slope = min(SLOPE_MOST, max(0.0, (xy + SLOPE_SURE) / (xx + SLOPE_SURE)))
        self._scale, self._factor, self._mean = math.exp(mean_y - self._slope * mean_x), lengths / fitted, lengths
        # Differences of the means above and below, both multiplied by above (1 - above).
        forecasted = self._factor * (fitted_above - above * fitted)
        came = lengths_above - above * lengths
        seen, sure = moments.count * came, SHARE_SURE * forecasted
        share = (seen + sure) / (moments.count * forecasted + sure) if forecasted > SPREAD_LEAST * lengths else 1.0
        self._share = min(1.0, max(0.0, share))
        return first


class Tail:
    """A high quantile of what was observed: its weights decay, and a histogram by logarithms keeps them.

    FIT_EVERY observations are added at once; single additions would cost most of the time spent on an arrival.
    beyond : part of the observations beyond the quantile.  memory : of them, until a weight has fallen to a third

    value : an edge, beyond which at most this part was observed; inf before the first FIT_EVERY observations
    """

    def __init__(self, beyond: float, memory: int = 8192) -> None:
        self._beyond = beyond
        self._keep = (1.0 - 1.0 / memory) ** FIT_EVERY
        self._weights = np.zeros(int(EDGES_PER_E * (LOG_MOST - LOG_LEAST)))  # of what is below each edge, descending
        self._new: list[float] = []
        self.value = math.inf

    def observe(self, value: float) -> None:
        """value : >= 0"""
        self._new.append(value)
        if len(self._new) < FIT_EVERY:
            return
        logs = np.log(np.maximum(self._new, math.exp(LOG_LEAST)))
        weights = self._weights
        weights *= self._keep
        places = (EDGES_PER_E * (LOG_MOST - logs)).astype(int)
        np.add.at(weights, places.clip(0, weights.size - 1), 1.0)
        self._new = []
        place = int(np.searchsorted(weights.cumsum(), self._beyond * weights.sum(), side="right"))
        self.value = math.exp(LOG_MOST - place / EDGES_PER_E)


class Waits:
    """The waits that first come, first served would give, and the room that they leave to other orders.

    Such a wait w is the waiting work at an arrival, over the slots. The work is nearly the same under every order that
    leaves no slot empty, so an order that goes by these waits hardly changes them. The longest requests wait until
    last, so all others wait for v at most: what w is without the work of the longest. No rate and no distribution is
    assumed: only the waits and their past count, so the room closes while a queue grows beyond all earlier ones.

    memory : arrivals after which an observation's weight has fallen to a third.

    room       for delays: its slack is what v is below the 99th percentile of w + s, the latencies that first come,
               first served would give; its margin is MARGIN of this percentile
    room_s     that of a mean request
    longest_s  the longest w; arrivals that need not wait forget it slowly
    All follow the measurements in steps, for requests are sorted by them.
    """

    def __init__(self, memory: int = 8192, room: Room = NO_ROOM) -> None:
        self._tail = Tail(TAIL, memory)
        self._keep = 1.0 - 1.0 / (memory * 8)
        self._longest_s = self._ahead_s = 0.0
        self.room_s = self.longest_s = 0.0
        self.room = room

    def observe(self, wait_s: float, usual_s: float, service_s: float, mean_s: float) -> bool:
        """Count an arrival. True when the room changed.

        wait_s : w, >= 0.  usual_s : v.  service_s : likely time of the request.  mean_s : of a mean request
        """
        self._tail.observe(wait_s + service_s)
        self._ahead_s = max(self._ahead_s, usual_s)
        if wait_s > self._longest_s:
            self._longest_s = wait_s
        elif wait_s <= 0.0:
            self._longest_s *= self._keep
            self._ahead_s *= self._keep
        longest_s, ahead_s = self._longest_s, self._ahead_s
        if longest_s <= 0.0:
            return False
        tail_s = max(usual_s, min(self._tail.value, longest_s + service_s))
        last_s = LONGEST * longest_s - ahead_s
        room = Room(tail_s - usual_s, MARGIN * tail_s, ahead_s, last_s)
        room_s = room.of_s(mean_s)
        if (
            _near(room_s, self.room_s, ROOM_CHANGES)
            and _near(longest_s, self.longest_s, LONGEST_CHANGES)
            and _near(last_s, self.room.last_s, LONGEST_CHANGES)
        ):
            return False
        self.room, self.room_s, self.longest_s = room, room_s, longest_s
        return True


def _near(measured: float, told: float, factor: float) -> bool:
    return measured <= factor * told and told <= factor * measured


class Load:
    """The load of one model, from which an order gets the sort keys of waiting requests.

    waits        how long requests would wait first come, first served
    calibration  what forecasts mean
    """

    def __init__(self) -> None:
        self.waits, self.calibration, self._works = Waits(), Calibration(), Tail(SPENT)

    def tell(self, requests: Iterable[QueuedRequest]) -> None:
        """Give requests the inputs of their sort keys."""
        room = self.waits.room
        for queued in requests:
            queued.room = room

    def likely_tokens(self, forecast: float | None, mean: float) -> float:
        """The mean length of answers of this forecast. forecast : tokens; None without one. mean : of all answers"""
        return self.calibration.tokens(forecast) if forecast else mean

    def arrive(self, queued: QueuedRequest, amount: Amount, ahead: int, slots: int) -> bool:
        """Learn from a new request. True when the waits changed.

        amount : of those that wait already.  ahead : requests that wait in engines.  slots : of the model
        """
        mean_s, slots = queued.service_mean_s, max(1, slots)
        self._works.observe(queued.service_s)
        queued.long_s = max(self._works.value, LONG_LEAST * mean_s)
        work_s = 1e-6 * amount.work_us + ahead * mean_s
        usual_s = (work_s - 1e-6 * amount.long_us) / slots
        changed = self.waits.observe(work_s / slots, usual_s, queued.service_s, mean_s)
        queued.room = self.waits.room
        return changed

    def answered(self, queued: QueuedRequest, output_tokens: float) -> bool:
        """Learn from an answer. True when forecasts are calibrated for the first time: those of waiting requests are
        not yet, and what was measured by such forecasts has been forgotten. It is told until further requests arrive:
        a burst after which none arrive has waits, too.
        """
        forecast = queued.request.expected_tokens
        if not (output_tokens > 0 and forecast and self.calibration.observe(forecast, output_tokens)):
            return False
        before, self.waits, self._works = self.waits, Waits(room=self.waits.room), Tail(SPENT)
        self.waits.room_s, self.waits.longest_s = before.room_s, before.longest_s
        return True
