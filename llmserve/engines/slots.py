"""How many requests an engine runs at once, learnt from its answers.

A front-end sees when it sends a request, when a stream begins, and when an answer ends. An engine starts its requests
in the order of their arrival, so the time that a request takes there tells how many run at once:

    asked    requests in flight when the request was sent, itself included
    service  seconds from a request's slot to the first token of a stream; or to the end of a whole answer, for each of
             its tokens. Measured on requests that had room
    had      requests that ran at once when the request got its slot. had < asked: the request has waited, and the
             engine has `had` slots

A stream got its slot `service` before its first token, so the answers that had ended by then do not count. Of a whole
answer only the end is seen: of `asked` requests that take `seconds` each, asked * service / seconds run (Little's law).

The number doubles, from few on, as soon as that many streams advance at once, which proves that many slots: a time to
first token for each step. When a request waits, the limit is found. Then the learner holds the number, and tries a few
requests more from time to time, ever less often while these wait. The number falls when requests wait although no more
are in flight than the number. Whole answers prove nothing, so the rates of two numbers are compared, also downwards.

What an engine tells of itself comes first: a number of slots is a fact, and where an engine counts the requests that
run and wait in it, answers only prove slots.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

from llmserve.engines.dialects import Told

SLOTS_FIRST = 2  # before anything is known: a second request shows whether the engine runs more than one
SLOTS_MAX = 1 << 16  # no engine has as many: an engine that always claims to be full must not grow without end
ENDS_MOST = 1 << 14  # times of the last ends that are kept, also where an older request still runs
ENDS_LOOKED = 1 << 10  # ends until it is asked again which are older than each running request

FIRST_GROWTH = 2  # growth factor of the number of slots before anything has waited
GROWTH = 1.25  # the same factor after requests have waited inside the engine once
LATE = 1.25  # times the service: a stream that begins later than this has waited
ALL_STREAMS = 0.95  # share of streams among the answers from which on the streams that advance are all that runs
STREAMS_LEAST = 0.25  # the share below which whole answers are looked at
SHARE_MEMORY = 20  # answers after which the weight of an observed share has fallen to a third
PACE_MEMORY = 32  # the same of a pace
STREAM_STEP, WHOLE_STEP = 0.06, 0.25  # of the slots: how many more, or fewer, are tried
STEP_PAYS = 0.5  # of what a step would bring if there is room: what it must bring with streams
WHOLE_PAYS, WHOLE_PAYS_FEW, WHOLE_TRY_PAYS = (
    0.06,
    0.12,
    0.15,
)  # with whole answers: in the search, with few slots; later
CLEAR = 0.6  # the same share, from which on one whole answer is enough
SAME = 0.1  # the same share, below which fewer slots do as well
FEW = 4  # slots, up to which a burst of whole answers is judged as it comes
PAUSE_FIRST, PAUSE_MOST = 16, 256  # answers between two tries
WITNESSES_MAX = 8  # requests that have waited, before the number follows
TOLD_AHEAD, TOLD_AHEAD_SLOTS = 2, 20  # where an engine counts them, two that wait show at any time that it is full
WAY_SPARED = 0.02  # of an answer's time: a way to the engine that costs less needs no look-ahead


class _Sent:
    """A request in flight. ended : answers of the engine that had ended before"""

    __slots__ = ("asked", "at_s", "began_s", "ended")

    def __init__(self, at_s: float, asked: int, ended: int) -> None:
        self.at_s, self.asked, self.ended = at_s, asked, ended
        self.began_s: float | None = None


class _Typical:
    """A running median, which an observation moves by a tenth at most. None before the first."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, value: float) -> None:
        old = self.value
        if value > 0.0:
            self.value = value if old is None else min(max(value, old / 1.1), old * 1.1)


class _Least:
    """A running minimum, which rises by a hundredth at each observation."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = math.inf

    def observe(self, value: float) -> None:
        self.value = min(value, 1.01 * self.value)


class _Pace:
    """Seconds for each token, by the sums of both over the last answers."""

    __slots__ = ("seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = self.tokens = 0.0

    def observe(self, seconds: float, tokens: float) -> None:
        keep = 1.0 - 1.0 / PACE_MEMORY
        self.seconds, self.tokens = keep * self.seconds + seconds, keep * self.tokens + tokens

    @property
    def value(self) -> float | None:
        return self.seconds / self.tokens if self.seconds > 0.0 else None


class _Level:
    """What was seen since the number has changed, or since a try has begun.

    waited    `had` of requests that have waited.  unproven : streams that began in time, but beside too few others
    peak      most that were seen at once.  most : most `had` of the tests
    tests     answers that were asked for more than was proven; asked, had : their sums.  pace : of these
    settled   whether the burst that follows a change is over
    """

    __slots__ = ("asked", "had", "most", "pace", "peak", "settled", "since_s", "tests", "unproven", "waited")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.waited: list[float] = []
        self.unproven = self.peak = self.most = 0
        self.settled = False
        self.forget()

    def forget(self) -> None:
        """Count the tests anew."""
        self.tests, self.asked, self.had, self.pace = 0, 0.0, 0.0, _Pace()

    def test(self, asked: float, had: float) -> tuple[float, float]:
        """Add a test. Returns the means so far of what was asked and had."""
        self.tests += 1
        self.asked += asked
        self.had += had
        return self.asked / self.tests, self.had / self.tests


class SlotsLearner:
    """The number of an engine's slots, and of requests to send beyond these.

    slots       the first guess
    fixed       the number is known: only the look-ahead is learnt
    look_ahead  a constant look-ahead; None: as many as the way to the engine costs
    in_order    the engine starts its requests in the order of their arrival; False: only streams that advance count

    found       the limit was found: before, there may be far more slots
    """

    def __init__(
        self, slots: int = SLOTS_FIRST, *, fixed: bool = False, look_ahead: int | None = None, in_order: bool = True
    ) -> None:
        self._number, self.found = slots, fixed
        self._fixed, self._look_ahead, self._in_order = fixed, look_ahead, in_order
        self._told: tuple[int, int] | None = None  # requests that run and wait, as the engine told last
        self._running: dict[int, _Sent] = {}
        self._advancing = 0  # streams that have begun and not ended
        self._streams: float | None = None  # share among the answers
        self._ends: list[float] = []
        self._ends_forgotten, self._ends_due = 0, ENDS_LOOKED
        self._now_s = -math.inf
        self._first_s = _Typical()  # from a request that has room to its first token
        self._answer_s = _Typical()  # from the first token of a stream to its end
        self._sent_s, self._freed_s = _Least(), _Least()  # to a first token: from the request, and from the slot's end
        self._way_ahead = 0
        self._pace = _Pace()  # of whole answers, at this number of slots
        self._search()

    def _search(self) -> None:
        """Take the number as a guess."""
        self._proven = self._number if self.found else 1
        self._pause = self._hold = PAUSE_FIRST
        self._down = True  # whether the last try was of fewer slots
        self._begin()

    def _begin(self) -> None:
        self._level, self._tried = _Level(self._now_s), 0

    @property
    def slots(self) -> int:
        """The number, or fewer while fewer are tried."""
        return self._number + min(0, self._tried)

    @property
    def look_ahead(self) -> int:
        """Requests to send beyond the slots: what the way costs, and what is tried."""
        return self._ahead + max(0, self._tried)

    @property
    def _ahead(self) -> int:
        if self._look_ahead is not None:
            return self._look_ahead
        return TOLD_AHEAD if self._counted else self._way_ahead

    @property
    def _counted(self) -> bool:
        """Whether the engine's own counts are enough, so that nothing need be tried."""
        return self._told is not None and self._number >= TOLD_AHEAD_SLOTS

    # ---- what answers show ----

    def sent(self, request_id: int, now_s: float) -> None:
        """A request goes to the engine."""
        ended = self._ends_forgotten + len(self._ends)
        self._running[request_id] = _Sent(now_s, len(self._running) + 1, ended)

    def began(self, request_id: int, now_s: float) -> None:
        """The first token of a stream is there."""
        sent = self._running.get(request_id)
        if sent is None or sent.began_s is not None:
            return
        sent.began_s = self._now_s = now_s
        self._advancing += 1
        self._streams = 1.0 if self._streams is None else self._streams + (1.0 - self._streams) / SHARE_MEMORY
        took_s, asked = now_s - sent.at_s, sent.asked
        service_s, since = self._first_s.value or took_s, max(0, sent.ended - self._ends_forgotten)
        ended, had = len(self._ends) - since, asked
        if took_s > LATE * service_s and ended and self._in_order:
            before = bisect_right(self._ends, now_s - LATE * service_s, since) - since
            had = max(1, asked - min(before + 1, ended))  # one more end: the one that gave the slot
            if ended == 1:
                self._freed_s.observe(now_s - self._ends[-1])
        if had == asked:
            self._sent_s.observe(took_s)
        if self._first_s.value is None or (asked <= self._proven and (asked == 1 or sent.at_s >= self._level.since_s)):
            self._first_s.observe(took_s)
        if not self._fixed or self._look_ahead is None:
            others_first = self._in_order and self._streams < ALL_STREAMS
            self._stream(asked, had, max(1, asked - ended) if others_first else self._advancing)

    def ended(self, request_id: int, now_s: float, tokens: float) -> None:
        """A request has left the engine. tokens : of the whole answer; 0: unknown, or none"""
        sent = self._running.pop(request_id, None)
        if sent is None:
            return
        self._now_s = now_s
        if sent.began_s is not None:
            self._advancing -= 1
            self._answer_s.observe(now_s - sent.began_s)
        elif tokens > 0 and now_s > sent.at_s:
            self._streams = 0.0 if self._streams is None else self._streams - self._streams / SHARE_MEMORY
            counts = sent.at_s >= self._level.since_s and self._in_order and not self._counted and not self._fixed
            if counts and self._streams < STREAMS_LEAST:
                self._whole(sent.asked, now_s - sent.at_s, tokens)
        self._ends.append(now_s)
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
        if self._fixed:
            return
        if told.slots is not None:
            if not self.found or told.slots != self._number:
                self._set(told.slots)
                self.found = True
            return
        if running is None or waiting is None:
            return
        before, self._told = self._told or (0, 0), (running, waiting)
        full = running >= self._number and not waiting and (self._counted or not self.found)
        if min(before[1], waiting) > self.look_ahead:  # twice: a reading may fall before a request's first step
            self._set(max(before[0], running))
            self.found = True
        elif self.found and running > self._number + self._ahead:
            self._set(running)
        elif full and not self.found:
            self._set(FIRST_GROWTH * self._number + 1)
        elif full and before[0] >= self._number and not before[1]:
            self._set(int(GROWTH * self._number) + 1)

    def restarted(self) -> None:
        """The engine has lost its requests. It may come back with other slots, so the search begins anew."""
        self._running.clear()
        self._advancing, self._told, self._pace = 0, None, _Pace()
        self.found = self._fixed
        if not self._fixed:
            self._number = SLOTS_FIRST
        self._search()

    # ---- what follows ----

    def _stream(self, asked: int, had: int, seen: int) -> None:
        """A stream has begun. seen : that many ran at once for certain, itself included"""
        slots, level = self._number, self._level
        level.peak = max(level.peak, seen)
        if self._fixed:
            self._try_streams(asked, had)
            self._next_try(asked, STREAM_STEP)
        elif seen >= slots and not self.found:
            self._double(seen)
        elif seen > slots:
            self._set(seen)
            self._tried = max(1, round((GROWTH - 1.0) * seen))
        elif self._counted or not self._in_order:
            return
        elif not self.found:
            if asked > self._proven and had < asked:
                self._waited(had, slots - self._proven)
            elif asked >= slots:
                level.unproven += 1
                if level.unproven > 4 + slots // 8:
                    self._waited(level.peak, 0)
        elif self._tried > 0 and asked > slots + self._ahead:
            self._try_streams(asked, had)
        else:
            if had < asked and had < slots - max(0.25, STREAM_STEP * slots):
                self._waited(had, slots)
            elif level.waited:
                level.waited.pop()
            self._next_try(asked, STREAM_STEP)

    def _try_streams(self, asked: int, had: int) -> None:
        """Judge a try by the streams that were sent for it."""
        slots, tried = self._number, self._tried
        if tried <= 0 or not slots + self._ahead < asked <= slots + self._ahead + tried:
            return
        level = self._level
        level.most = max(level.most, had)
        asked_mean, had_mean = level.test(asked, had)
        pays = had_mean - slots >= STEP_PAYS * (asked_mean - slots)
        if level.tests < (1 if not pays and slots < WITNESSES_MAX * 2 else max(2, tried)):
            return
        if pays and not self._fixed:
            self._set(level.most)
            self._tried = 2 * tried
        else:
            self._rest(0)
            way = (self._sent_s.value - self._freed_s.value) / (self._answer_s.value or math.inf)
            self._way_ahead = max(0, math.ceil(slots * (way - WAY_SPARED))) if math.isfinite(way) else 0

    def _whole(self, asked: int, seconds: float, tokens: float) -> None:
        """A whole answer has come, to a request that was sent at this number of slots."""
        slots, level = self._number, self._level
        if self.found and not 0.8 * (limit := slots + self._ahead + self._tried) <= asked <= limit:
            return  # the engine was emptier or fuller than the number says
        if self.found and not self._tried:
            self._pace.observe(seconds, tokens)
            self._next_try(slots, WHOLE_STEP, down=not self._down and slots > 1)
        elif asked <= self._proven and self._tried >= 0:
            if not self.found:
                self._pace.observe(seconds, tokens)
        else:
            level.pace.observe(seconds, tokens)
            level.peak = max(level.peak, asked)
            asked_mean, _ = level.test(asked, asked)
            pace, tried = self._pace.value, level.pace.value
            assert tried is not None, "observed above"
            self._judge(asked_mean, (pace or tried) / tried)

    def _judge(self, asked: float, ratio: float) -> None:
        """Judge more, or fewer, requests by their paces. ratio : of the pace before to theirs; 1: as fast as before"""
        slots, level = self._number, self._level
        base = slots if self.found else self._proven
        full = base / asked
        share = (
            (ratio - full) / (1.0 - full) if asked != base else 1.0
        )  # 0: no gain at all; 1: as much as there is room
        if not self.found:
            if share <= CLEAR and not self._burst_is_over(share):
                return
            if share > (WHOLE_PAYS_FEW if slots <= 16 else WHOLE_PAYS):
                self._pace = level.pace
                self._double(level.peak)
            else:
                self._set(max(self._proven, round(min(1.0, ratio) * asked)))
                self.found, self._pace = True, _Pace()
        elif level.tests >= max(WITNESSES_MAX, slots // 2):
            more = self._tried > 0
            if share > WHOLE_TRY_PAYS if more else share < SAME:
                self._pace = level.pace
                self._set(max(slots + 1, round(min(1.0, ratio) * asked)) if more else slots + self._tried)
                self._hold, self._down = max(WITNESSES_MAX, self._number // 2), more  # on in the same direction
            else:
                self._rest(slots)

    def _burst_is_over(self, share: float) -> bool:
        """Whether enough whole answers were seen: where slots are many, of requests sent after the first burst."""
        slots, level = self._number, self._level
        if slots > FEW and not level.settled:
            if level.tests >= slots - self._proven:
                level.settled = True
                level.forget()
            return False
        at_once = slots <= SLOTS_FIRST and share < SAME
        return at_once or level.tests >= max(WITNESSES_MAX, slots // 2)

    # ---- changes of the number ----

    def _set(self, slots: float) -> None:
        """Take a number that is found."""
        self._number = self._proven = max(1, min(SLOTS_MAX, round(slots)))
        self._pause = self._hold = PAUSE_FIRST
        self._begin()

    def _double(self, proven: int) -> None:
        """Search on above a number that was proven."""
        self._proven, self._number = proven, min(SLOTS_MAX, FIRST_GROWTH * proven)
        self._begin()

    def _waited(self, had: float, doubt: int) -> None:
        """A request has waited while `had` ran. doubt : between the numbers that may be right"""
        witnesses = self._level.waited
        witnesses.append(had)
        if len(witnesses) >= max(2 if self.found else 1, min(WITNESSES_MAX, doubt // 4)):
            middle = sorted(witnesses)[len(witnesses) // 2]
            self._set(middle if self.found else max(self._proven, middle))
            self.found = True

    def _next_try(self, asked: int, step: float, *, down: bool = False) -> None:
        """Count an answer of a full engine; begin a try when there were enough."""
        if self._tried or asked < self._number:
            return
        self._hold -= 1
        if self._hold <= 0:
            self._begin()
            self._tried, self._down = max(1, round(step * self._number)) * (-1 if down else 1), down

    def _rest(self, least: int) -> None:
        """End a try that was for nothing: the next comes later. least : answers until then"""
        self._tried = 0
        self._hold = max(self._pause, least)
        self._pause = min(2 * self._pause, PAUSE_MOST)

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
