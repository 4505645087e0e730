"""How many requests an engine runs at once, learnt from its answers.

A front-end sees when it sends a request, when a stream begins, and when an answer ends. An engine starts its requests
in the order of their arrival, so the time that a request takes there tells how many run at once:

    asked    requests in flight when the request was sent, itself included; one of n choices counts n times
    service  seconds from a request's slot to the first token of a stream. Measured on requests that had room
    had      requests that ran at once when the request got its slot. had < asked: the request has waited, and the
             engine has `had` slots

A stream got its slot `service` before its first token, so the answers that had ended by then do not count. But a late
stream may have waited for something else: a long prompt, a stall. So the likelihoods of the two are compared. A wait
for a slot is over shortly after an end, however few ends there are, and shows the same `had` each time. Streams that
something else holds up begin at any time, beside any number, and together. Of a whole
answer only the end is seen, and its tokens. Each number of slots says when each request got its slot; under the right
number the answers have about the same pace (whole_answers.py).

The number doubles, from few on, as soon as it is seen that as many run at once: streams that advance at once prove it,
a time to first token for each step; of whole answers, their likelihood. When a request waits, the limit is found. Then
the learner holds the number, and tries a few requests more from time to time, ever less often while these wait. The
number falls when requests wait although no more are in flight than the number; where answers are whole, a try shows it.

While an engine loads a model, nothing that it has got by then shows anything.

What an engine tells of itself comes first: a number of slots is a fact until the engine restarts. Where an engine
counts the requests that run and wait in it, answers only prove slots.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

import numpy as np

from llmserve.engines.dialects import Told
from llmserve.engines.whole_answers import Explained, Pace, WholeAnswers

SLOTS_FIRST = 2  # before anything is known: a second request shows whether the engine runs more than one
SLOTS_MAX = 1 << 16  # no engine has as many: an engine that always claims to be full must not grow without end
ENDS_MOST = 1 << 14  # times of the last ends that are kept, also where an older request still runs
ENDS_LOOKED = 1 << 10  # ends until it is asked again which are older than each running request

FIRST_GROWTH = 2  # growth factor of the number of slots before anything has waited
GROWTH = 1.25  # the same factor after requests have waited inside the engine once
END_LATE = 0.5  # of the service: for so long may an end be on its way while the stream that got its slot begins
LATE = 1.25  # times the service: a stream that begins later than this has waited
ALL_STREAMS = 0.95  # share of streams among the answers from which on the streams that advance are all that runs
STREAMS_LEAST = 0.25  # the share below which whole answers are looked at
LATEST_LEAST = 1 / 20  # weight of the latest answer in the share of streams
TRY_STEP = 0.06  # of the slots: how many more are tried
STEP_PAYS = 0.5  # of what a step would bring if there is room: what it must bring with streams
NEARLY_ALL = 0.9  # of the limit: a number of slots from which on the limit may be doubled
GROW_ODDS, FOUND_ODDS, SURE_ODDS = 1.5, 4.0, 6.0  # logarithms of odds: to double; to stop, after some answers; at once
MORE_ODDS, FEWER_ODDS = 2.5, 4.0  # the same, to take a larger or a smaller number in a try
ANSWERS_LEAST = 4  # whole answers before the numbers are compared, but for sure odds
ANSWERS_SHARE = 1 / 16  # the same, as a share of the number
LOADED = 0.8  # of the slots: the least in flight for a whole answer to count in a try
TRY_ANSWERS = 8  # whole answers after which a try is over, or as many as slots
PAUSE_FIRST, PAUSE_ONE, PAUSE_MOST = 16, 64, 512  # answers between two tries: at first; of one slot at first; at most
WITNESSES_MAX, WITNESSES_KEPT = 8, 32  # requests that have waited, before the number follows; the last that count
WAITED_ODDS = 3.0  # logarithm of the odds that these have waited for slots, and not for something else
FIT_SPREAD = 1.0  # of the logarithm of the time from a slot to the first token
FIT_LEAST = 0.1  # share of streams that have waited for a slot, and whose first token fits no end
LATE_SHARE, LATE_MEMORY = 1 / 3, 64  # share of streams that are late although they have room: the least; its memory
TOLD_AHEAD, TOLD_AHEAD_SLOTS = 2, 20  # where an engine counts them, two that wait show at any time that it is full
EACH_MEMORY, EACH_ONE = 20, 1.02  # requests of which the mean of sequences is taken; up to which mean all have one
WAY_SPARED = 0.02  # of an answer's time: a way to the engine that costs less needs no look-ahead


class _Sent:
    """A request in flight, of one sequence for each choice. ended : sequences of the engine that had ended before"""

    __slots__ = ("asked", "at_s", "began_s", "ended", "sequences")

    def __init__(self, at_s: float, sequences: int, asked: int, ended: int) -> None:
        self.at_s, self.sequences, self.asked, self.ended = at_s, sequences, asked, ended
        self.began_s: float | None = None


class _Typical:
    """A running median, which an observation moves by a tenth at most. None before the first.

    doubted : the next observation replaces the value
    """

    __slots__ = ("doubted", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        self.doubted = False

    def observe(self, value: float) -> None:
        old = self.value
        if value > 0.0:
            self.value = value if old is None or self.doubted else min(max(value, old / 1.1), old * 1.1)
            self.doubted = False


class _Least:
    """A running minimum, which rises by a hundredth at each observation."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = math.inf

    def observe(self, value: float) -> None:
        self.value = min(value, 1.01 * self.value)


class _Level:
    """What was seen since the number has changed, or since a try has begun.

    waited    for each request that may have waited for a slot: `had`, the logarithm of the odds that it did, and that
              of the number of `had` that another cause of the wait could have shown as well
    unproven  streams that were asked for all slots, but began beside too few others
    peak      most that were seen at once.  most : most `had` of the tests
    tests     streams that were asked for more than was proven; asked, had : their sums
    room      logarithm of the odds that these had room
    answers   whole answers to requests that were sent since
    surplus   since when more streams advance than the number, how many, and the sequences that have ended since; None
    """

    __slots__ = ("answers", "asked", "had", "most", "peak", "room", "since_s", "surplus", "tests", "unproven", "waited")

    def __init__(self, since_s: float, due: int) -> None:
        self.since_s = since_s
        self.waited: list[tuple[float, float, float]] = []
        self.unproven = self.peak = self.most = 0
        self.tests, self.asked, self.had, self.room = 0, 0.0, 0.0, 0.0
        self.answers = WholeAnswers(due)
        self.surplus: tuple[float, int, int] | None = None

    def test(self, asked: float, had: float) -> tuple[float, float]:
        """Add a test. Returns the means so far of what was asked and had."""
        self.tests += 1
        self.asked += asked
        self.had += had
        return self.asked / self.tests, self.had / self.tests


def _density(seconds: float) -> float:
    """Probability density of the time from a slot to the first token. seconds : over what is usual"""
    if seconds <= 0.0:
        return 0.0
    off = math.log(seconds) / FIT_SPREAD
    return math.exp(-0.5 * off * off) / (math.sqrt(math.tau) * FIT_SPREAD * seconds)


class SlotsLearner:
    """The number of an engine's slots, and of requests to send beyond these.

    slots       the first guess
    fixed       the number is known: only the look-ahead is learnt
    look_ahead  a constant look-ahead; None: as many as the way to the engine costs
    in_order    the engine starts its requests in the order of their arrival; False: only streams that advance count

    slots       the number, in requests: where requests have several choices, fewer than the engine's sequences
    look_ahead  requests to send beyond the slots: what the way costs, and what is tried
    found       the limit was found: before, there may be far more slots
    """

    def __init__(
        self, slots: int = SLOTS_FIRST, *, fixed: bool = False, look_ahead: int | None = None, in_order: bool = True
    ) -> None:
        self._number, self.found = slots, fixed
        self._known = fixed  # set, or told: only the look-ahead is learnt
        self._fixed, self._look_ahead, self._in_order = fixed, look_ahead, in_order
        self._told: tuple[int, int] | None = None  # requests that run and wait, as the engine told last
        self._started_s: float | None = None  # when the engine's process started, as it told
        self._running: dict[int, _Sent] = {}
        self._in_flight, self._each = 0, 1.0  # sequences; mean of a request
        self._loading: set[int] = set()  # requests for which the engine loads their model
        self._loaded_s = -math.inf  # when the last load had ended
        self._advancing = 0  # streams that have begun and not ended
        self._streams, self._latest = 0.0, 1.0  # share of streams among the answers; weight of the latest
        self._ends: list[float] = []
        self._ends_forgotten, self._ends_due = 0, ENDS_LOOKED
        self._now_s = -math.inf
        self._first_s = _Typical()  # from a request that has room to its first token
        self._answer_s = _Typical()  # from the first token of a stream to its end
        self._sent_s, self._freed_s = _Least(), _Least()  # to a first token: from the request, and from the slot's end
        self._way_ahead = 0
        self._pace: Pace | None = None  # of whole answers, when the number was last looked at
        self._search()

    def _search(self) -> None:
        """Take the number as a guess."""
        self._proven = self._number if self.found else 1
        self._late, self._late_s = LATE_SHARE, -math.inf  # share of streams that had room; begin of the last late one
        self._pause = self._hold = PAUSE_FIRST
        self._begin()

    def _begin(self, tried: int = 0) -> None:
        """Look anew. tried : requests beyond the number"""
        due = max(2 if self.found else 1, math.ceil(ANSWERS_SHARE * self._number))
        self._level, self._tried = _Level(self._now_s, due), tried
        self._follow()

    def _follow(self) -> None:
        """Let what is told to the scheduler follow the number, the try and the way."""
        self._counted = self._told is not None and self._number >= TOLD_AHEAD_SLOTS
        self._ends_tell = self._in_order and not self._known and not self._counted
        if self._look_ahead is not None:
            self._ahead = self._look_ahead
        else:
            self._ahead = TOLD_AHEAD if self._counted else self._way_ahead
        self._limit = self._number + self._ahead + self._tried
        self.slots, self.look_ahead = self._number, self._ahead + self._tried
        if self._each > 1.0 and not self._fixed:
            self.slots = max(1, round(self._number / self._each))
            self.look_ahead = math.ceil(self.look_ahead / self._each)

    # ---- what answers show ----

    def sent(self, request_id: int, now_s: float, sequences: int = 1, *, loads: bool = False) -> None:
        """A request goes to the engine. loads : the engine must load the model first, or is doing so"""
        self._in_flight += sequences
        ended = self._ends_forgotten + len(self._ends)
        self._running[request_id] = _Sent(now_s, sequences, self._in_flight, ended)
        if loads:
            self._loading.add(request_id)
            self._loaded_s = math.inf
        if sequences > 1 or self._each > 1.0:
            self._each += (sequences - self._each) / EACH_MEMORY
            self._each = self._each if self._each > EACH_ONE else 1.0
            self._follow()

    def adopted(self, request_id: int, now_s: float, began_s: float | None, sequences: int = 1) -> None:
        """The engine runs a request that another process has sent. began_s : of its stream; None: it has not begun

        Beside how many it was sent is unknown. So until it has begun, or has left, other requests show nothing either.
        """
        self.sent(request_id, now_s, sequences, loads=began_s is None)
        if began_s is not None:
            self._running[request_id].began_s = began_s
            self._advancing += sequences

    def _has_loaded(self, request_id: int, now_s: float) -> None:
        """A request that may have waited for a load has begun, or has left."""
        self._loading.discard(request_id)
        if not self._loading:
            self._loaded_s = now_s

    def began(self, request_id: int, now_s: float) -> None:
        """The first token of a stream is there."""
        sent = self._running.get(request_id)
        if sent is None or sent.began_s is not None:
            return
        if self._level.surplus is not None:
            self._confirm(now_s)
        sent.began_s = self._now_s = now_s
        self._advancing += sent.sequences
        self._streams += (1.0 - self._streams) * self._latest
        if self._latest > LATEST_LEAST:
            self._latest /= 1.0 + self._latest
        if self._loading:
            self._has_loaded(request_id, now_s)
        if sent.at_s < self._loaded_s:
            return
        took_s, asked = now_s - sent.at_s, sent.asked
        service_s, since = self._first_s.value or took_s, max(0, sent.ended - self._ends_forgotten)
        ended, had, odds = len(self._ends) - since, asked, 0.0  # odds : that the request has waited for a slot
        if took_s > LATE * service_s and ended and self._in_order:
            before = bisect_right(self._ends, now_s - service_s, since) - since
            had = max(1, asked - min(before + sent.sequences, ended))  # more ends: those that gave the slots
            odds = self._fit(since, now_s, service_s, ended / took_s)
            if now_s - self._late_s > LATE * service_s:  # else what held the last one up may have held up this one too
                odds -= math.log(max(LATE_SHARE, self._late))
                self._late += (1.0 - self._late) / LATE_MEMORY if asked <= self._proven else 0.0
            self._late_s = now_s
            if ended == 1:
                self._freed_s.observe(now_s - self._ends[-1])
        if had == asked:
            self._sent_s.observe(took_s)
            self._late -= self._late / LATE_MEMORY
        if self._first_s.value is None or (asked <= self._proven and (asked == 1 or sent.at_s >= self._level.since_s)):
            self._first_s.observe(took_s)
        if not self._known or self._look_ahead is None:
            others_first = self._in_order and self._streams < ALL_STREAMS
            self._stream(sent, had, max(1, asked - ended) if others_first else self._advancing, odds)

    def _fit(self, since: int, now_s: float, service_s: float, ends_per_s: float) -> float:
        """Logarithm of the odds that an end has given a late stream its slot, against ends that come at any time.

        since : the first end that came after the request.  ends_per_s : meanwhile
        """
        near = bisect_right(self._ends, now_s - service_s, since)
        fit = max([_density((now_s - end_s) / service_s) for end_s in self._ends[max(since, near - 1) : near + 1]])
        return math.log((1.0 - FIT_LEAST) * fit / (ends_per_s * service_s) + FIT_LEAST)

    def ended(self, request_id: int, now_s: float, tokens: float) -> None:
        """A request has left the engine. tokens : of the whole answer; 0: unknown, or none"""
        sent = self._running.pop(request_id, None)
        if sent is None:
            return
        self._now_s = now_s
        sequences = sent.sequences
        if self._level.surplus is not None:
            self._confirm(now_s, sequences)
        self._in_flight -= sequences
        if sequences == 1:
            self._ends.append(now_s)
        else:
            self._ends += [now_s] * sequences
        if self._loading:
            self._has_loaded(request_id, now_s)
        if sent.began_s is not None:
            self._advancing -= sequences
            self._answer_s.observe(now_s - sent.began_s)
        elif tokens > 0:
            self._streams -= self._streams * self._latest
            if self._latest > LATEST_LEAST:
                self._latest /= 1.0 + self._latest  # a mean at first
            if (
                self._streams < STREAMS_LEAST
                and self._ends_tell
                and sent.at_s >= max(self._level.since_s, self._loaded_s)
            ):
                self._whole(sent, now_s, tokens / sequences)
        if len(self._ends) >= self._ends_due:
            self._forget_ends()

    def _forget_ends(self) -> None:
        """Forget the ends that came before each running request was sent: nobody asks for them again."""
        oldest = next(iter(self._running.values()), None)
        unneeded = len(self._ends) if oldest is None else oldest.ended - self._ends_forgotten
        unneeded = max(0, unneeded, len(self._ends) - ENDS_MOST)
        del self._ends[:unneeded]
        self._ends_forgotten += unneeded
        self._ends_due = len(self._ends) + ENDS_LOOKED

    # ---- what the engine tells ----

    def told(self, told: Told) -> None:
        """The engine has told its number of slots, or how many requests run and wait in it."""
        running, waiting = told.running, told.waiting
        if told.started_s is not None:
            before_s, self._started_s = self._started_s, max(told.started_s, self._started_s or 0.0)
            if before_s is not None and told.started_s > before_s:  # an earlier one is of another process, at one URL
                self._search_anew()
        if self._fixed:
            return
        if told.slots is not None:
            if not self._known or told.slots != self._number:
                self._known = self.found = True
                self._set(told.slots)
            return
        if running is None or waiting is None:
            return
        before, self._told = self._told or (0, 0), (running, waiting)
        self._follow()
        full = running >= self._number and not waiting and (self._counted or not self.found)
        if (
            min(before[1], waiting) > self._ahead + self._tried
        ):  # twice: a reading may fall before a request's first step
            self._set(max(before[0], running))
            self.found = True
        elif self.found and running > self._number + self._ahead:
            self._set(running)
        elif full and not self.found:
            self._set(FIRST_GROWTH * self._number + 1)
        elif full and before[0] >= self._number and not before[1]:
            self._set(int(GROWTH * self._number) + 1)

    def restarted(self) -> None:
        """The engine has lost its requests. It may come back with other slots."""
        self._running.clear()
        self._loading.clear()
        self._in_flight, self._loaded_s = 0, -math.inf
        self._advancing, self._started_s = 0, None
        self._search_anew()

    def _search_anew(self) -> None:
        """Begin the search anew: another process of the engine may have other slots."""
        self._told = self._pace = None
        self._first_s.doubted = True
        self.found = self._known = self._fixed
        if not self._fixed:
            self._number = max(SLOTS_FIRST, math.isqrt(self._number))  # half of the steps, if the slots are the same
        self._search()

    # ---- what follows ----

    def _stream(self, sent: _Sent, had: int, seen: int, odds: float) -> None:
        """A stream has begun. seen : that many ran at once for certain, itself included.  odds : see _waited"""
        slots, level, asked = self._number, self._level, sent.asked
        if seen > slots and self.found and not self._known:
            since_s, most, ended = level.surplus or (self._now_s, 0, 0)
            level.surplus, seen = (since_s, max(most, seen), ended), slots
        level.peak = max(level.peak, seen)
        if self._known:
            self._try_streams(sent, had)
            self._next_try(asked)
        elif seen >= slots and not self.found:
            self._double(seen)
        elif self._counted or not self._in_order:
            return
        elif not self.found:
            if had < asked > self._proven and had >= (1.0 - TRY_STEP) * self._proven:
                # with far less than was proven, something else has held it up
                self._waited(had, slots - self._proven, odds, asked - self._proven)
            elif asked >= slots:
                level.unproven += 1
                if level.unproven > 4 + slots // 8:
                    self._waited(level.peak, 0, WAITED_ODDS, 1)
        elif self._tried > 0 and asked > slots + self._ahead:
            self._try_streams(sent, had)
        else:
            if had < asked and had < slots - max(0.25, TRY_STEP * slots):
                self._waited(had, slots, odds, slots)
            elif level.waited:
                level.waited.pop()
            self._next_try(asked)

    def _confirm(self, now_s: float, ended: int = 0) -> None:
        """Take the number of streams that advance, unless an end explains those beyond the number: one that came later
        than the first token of the stream that got its slot. ended : sequences that end now
        """
        assert self._level.surplus is not None
        self._now_s = now_s
        since_s, seen, before = self._level.surplus
        if seen - before <= self._number:
            self._level.surplus = None
        elif now_s - since_s > END_LATE * (self._first_s.value or 0.0):
            self._set(seen - before, tried=max(1, round((GROWTH - 1.0) * (seen - before))))
        else:
            self._level.surplus = since_s, seen, before + ended

    def _try_streams(self, sent: _Sent, had: int) -> None:
        """Judge a try by the streams that were sent for it."""
        slots, tried, asked = self._number, self._tried, sent.asked
        if tried <= 0 or not slots + self._ahead < asked <= slots + self._ahead + tried:
            return
        level = self._level
        level.most = max(level.most, had)
        asked_mean, had_mean = level.test(asked, had)
        level.room += self._room(sent)
        pays = had_mean - slots >= STEP_PAYS * (asked_mean - slots)
        if level.tests < (1 if not pays and slots < WITNESSES_MAX * 2 else max(2, tried)):
            return
        if pays and not self._known and level.room < MORE_ODDS:
            if level.tests < max(TRY_ANSWERS, slots):
                return
            pays = False
        if pays and not self._known:
            self._set(level.most, tried=2 * tried)
        else:
            way = (self._sent_s.value - self._freed_s.value) / (self._answer_s.value or math.inf)
            self._way_ahead = max(0, math.ceil(slots * (way - WAY_SPARED))) if math.isfinite(way) else 0
            self._rest(0)

    def _room(self, sent: _Sent) -> float:
        """Logarithm of the odds that a stream had room beyond the slots, against a wait for one of these.

        Where answers end so soon after each other that it would hardly have waited, that shows nothing.
        """
        made_room = sent.ended - self._ends_forgotten + sent.asked - self._number - 1
        took_s, service_s = self._now_s - sent.at_s, self._first_s.value or 0.0
        left_s = self._now_s - self._ends[max(0, made_room)] if made_room < len(self._ends) else 0.0
        if took_s <= 0.0 or service_s <= 0.0:
            return 0.0
        room, waited = (_density(seconds / service_s) for seconds in (took_s, left_s))
        return math.log((room + FIT_LEAST) / (waited + FIT_LEAST))

    def _whole(self, sent: _Sent, now_s: float, tokens: float) -> None:
        """A whole answer has come, to a request that was sent at this limit."""
        if self.found and not self._tried:
            self._next_try(sent.asked)
            return
        slots, answers = self._number, self._level.answers
        if sent.asked < (LOADED * slots if self.found else self._proven):
            return  # too few were in flight to tell numbers apart
        if answers.add(sent.asked + sent.ended, sent.at_s, now_s, tokens):
            answers.due += answers.due if self.found else max(1, answers.due // 2)
            least = max(1, (slots if self.found else self._proven) // 2)
            explained = answers.explain(least, self._limit, self._ends, self._ends_forgotten, self._pace)
            if self.found:
                self._judge_try(explained)
            else:
                self._judge_search(explained)

    def _judge_search(self, explained: Explained) -> None:
        """Double the limit where as many run at once, or stop at the number that explains the answers."""
        limit = self._limit
        best, nearly_all = explained.best(), explained.numbers > NEARLY_ALL * limit - 0.5
        if nearly_all[best]:
            if explained.odds(best, ~nearly_all) >= GROW_ODDS:
                self._pace = explained.pace(-1)
                self._double(limit)
            return
        odds = explained.odds(best, explained.numbers == limit)
        if odds >= SURE_ODDS or (odds >= FOUND_ODDS and len(self._level.answers) >= ANSWERS_LEAST - 1):
            self._pace, self.found = explained.pace(best), True
            self._set(int(explained.numbers[best]))

    def _judge_try(self, explained: Explained) -> None:
        """Take another number that explains the answers better, or end a try in which requests have only waited."""
        slots, limit, count = self._number, self._limit, len(self._level.answers)
        best, here = explained.best(), int(np.argmin(abs(explained.numbers - slots)))
        number = int(explained.numbers[best])
        odds = explained.odds(best, explained.numbers == explained.numbers[here])
        if best != here and odds >= (MORE_ODDS if number > slots else FEWER_ODDS):
            if count >= max(ANSWERS_LEAST, 0 if number > slots else slots // 2):
                self._pace = explained.pace(best)
                if number < limit and abs(number - slots) <= TRY_STEP * slots:
                    self._number = self._proven = number
                    self._rest(number)  # hardly another number: tries become more seldom all the same
                else:
                    self._set(number, tried=2 * self._tried if number >= limit else 0)
        elif count >= max(TRY_ANSWERS, slots) or (
            best == here and count > 1 and explained.odds(here, explained.numbers != number) >= SURE_ODDS
        ):
            self._pace = explained.pace(here)
            self._rest(slots)

    # ---- changes of the number ----

    def _set(self, slots: float, *, tried: int = 0) -> None:
        """Take a number that is found. tried : go on to try so many more"""
        self._number = self._proven = max(1, min(SLOTS_MAX, round(slots)))
        self._pause = self._hold = PAUSE_FIRST if self._number > 1 else PAUSE_ONE
        self._begin(tried)

    def _double(self, proven: int) -> None:
        """Search on above a number that was proven."""
        self._proven, self._number = proven, min(SLOTS_MAX, FIRST_GROWTH * proven)
        self._begin()

    def _waited(self, had: float, doubt: int, odds: float, choices: int) -> None:
        """A request has waited while `had` ran, if the wait was for a slot.

        doubt    between the numbers that may be right
        odds     logarithm of the odds that the wait was for a slot
        choices  numbers that `had` could be if it was not
        """
        witnesses = self._level.waited
        witnesses.append((had, odds, math.log(choices)))
        del witnesses[:-WITNESSES_KEPT]
        if len(witnesses) < max(2 if self.found else 1, min(WITNESSES_MAX, doubt // 4)):
            return
        middle = sorted(witnesses)[len(witnesses) // 2][0]
        agree = [(odds, log) for had, odds, log in witnesses if abs(had - middle) <= TRY_STEP * middle]
        if sum(odds + log for odds, log in agree) - agree[0][1] >= WAITED_ODDS:  # the first has nothing to agree with
            self._set(middle if self.found else max(self._proven, middle))
            self.found = True

    def _next_try(self, asked: int) -> None:
        """Count an answer of a full engine; begin a try when there were enough."""
        if self._tried or asked < self._number:
            return
        self._hold -= 1
        if self._hold <= 0:
            self._begin(max(1, round(TRY_STEP * self._number)))

    def _rest(self, least: int) -> None:
        """End a try that was for nothing: the next comes later. least : answers until then"""
        self._tried = 0
        self._hold = max(self._pause, least)
        self._pause = min(2 * self._pause, PAUSE_MOST)
        self._follow()

    # ---- state ----

    def state(self) -> dict[str, Any]:
        return {"slots": self._number, "limit_reached": self.found}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises ValueError for anything else."""
        slots, found = state.get("slots"), state.get("limit_reached")
        if type(slots) is not int or slots < 1 or type(found) is not bool:
            raise ValueError(f"{state} is no state of an engine's slots")
        if not self._fixed:
            self._number, self.found = slots, found
            self._search()
