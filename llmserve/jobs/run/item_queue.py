"""Which lines of jobs enter the queue next, and when jobs will end. Reads no clock and does no I/O.

The scheduler decides when a line starts (choice/batch_lane.py), and sees a few hundred lines at a time. So its cost
does not depend on the size of jobs, and a line that was not handed over yet is only a number.

    sub-queue       the lines of one key and model. Each sub-queue has a part of the queue, so that lines which cannot
                    run now leave room for others; a sub-queue whose lines are refused is parked, alone
    order of jobs   within a sub-queue, by the ends of their windows
    order of lines  lines with the same prefix together, as an engine computes a prefix once; then by forecast length.
                    Where batches run to their end: the longest first. Where slots refill: mixed, so that the need for
                    memory is even, with the shortest last. They last as long as the longest answer may take, as
                    forecasts err and a long answer that begins late ends alone
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmserve.scheduling.rates import ItemRate

LINES_MAX = 256  # of all sub-queues, in the queue or on engines, beside the engines' slots
SUB_QUEUE_LINES_LEAST = 8  # of a sub-queue, where there are many: LINES_MAX is no limit of these
FACTOR_LINES = 16.0  # answers as many as which the first guess of their lengths counts
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # multiples of it, modulo 1, spread evenly however many are taken
LAST_SHARE_MOST = 0.5  # of a job's lines, the shortest, which run last
PAUSE_S, PAUSE_S_MAX = 0.25, 5.0  # of a sub-queue whose line was refused; half as long again each time
PARKED_S_MAX = 60.0  # a parked sub-queue is tried again after so long, whatever its refusal says


class Shapes(NamedTuple):
    """Lines as far as their places go: (n,) arrays.

    numbers : integers, each once.  tokens : float, forecast lengths.  prefixes : uint64, hashes of how prompts begin
    models : integers, the place of each line's model in its job's list
    """

    numbers: npt.NDArray[np.integer]
    tokens: npt.NDArray[np.floating]
    prefixes: npt.NDArray[np.uint64]
    models: npt.NDArray[np.integer] | None = None


class Arranged(NamedTuple):
    """Lines in the order in which they enter the queue, their forecast lengths and models likewise. (n,) arrays."""

    numbers: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.float32]
    models: npt.NDArray[np.uint16]


class Handed(NamedTuple):
    """A line that enters the queue. after_tokens : forecast length of all later lines of the job and model"""

    job: str
    number: int
    after_tokens: float


class Forecast(NamedTuple):
    """The forecast end of a job. in_time : whether the job ends within its window"""

    ends_at_s: float
    in_time: bool


class SubQueue:
    """The lines of one key and model.

    in_queue  lines that were handed over.  trouble : why the last line was refused; None: it was not
    until_s   when the next line is tried.  served_s : when it may be served, as far as the refusal says
    closed    why no line may start, told from outside: no engine of the model is up
    """

    def __init__(self, key: str, model: str) -> None:
        self.key, self.model = key, model
        self.rows: list[_Row] = []  # by their jobs' turns
        self.in_queue = 0
        self.trouble: str | None = None
        self.closed: str | None = None
        self.until_s = self.served_s = -math.inf
        self._pause_s = 0.0

    def park(self, trouble: str, now_s: float, retry_after_s: float = 0.0) -> None:
        """Let all lines wait, for one was refused. retry_after_s : as the refusal says; room may come earlier"""
        self._pause_s = min(PAUSE_S_MAX, max(PAUSE_S, 1.5 * self._pause_s))
        self.trouble, self.served_s = trouble, now_s + retry_after_s
        self.until_s = now_s + max(self._pause_s, min(PARKED_S_MAX, retry_after_s))

    def clear(self) -> None:
        """A line was served."""
        self.trouble, self.until_s, self.served_s, self._pause_s = None, -math.inf, -math.inf, 0.0

    def why_parked(self, now_s: float) -> str | None:
        """Why no line starts now; None: one may."""
        return self.closed or (self.trouble if now_s < self.until_s or (self.trouble and self.in_queue) else None)

    @property
    def waits(self) -> bool:
        return any(row.waits for row in self.rows)


class _Job:
    """A job with lines that have not ended.

    deadline_s : end of its window.  turn : within a sub-queue, ascending
    factor : of real lengths over forecasts, as the job's answers tell
    """

    def __init__(self, job_id: str, deadline_s: float, number: int, lines: Arranged, factor: float) -> None:
        self.id, self.deadline_s, self.turn = job_id, deadline_s, (deadline_s, number)
        self.rows: list[_Row] = []
        total = float(lines.tokens.sum(dtype=np.float64))
        self._expected = FACTOR_LINES * total / len(lines.tokens)  # of answers that count as seen at the start
        self._real = factor * self._expected

    @property
    def factor(self) -> float:
        return self._real / self._expected if self._expected else 1.0

    def observe(self, expected: float, tokens: float) -> None:
        """Note the real length of an answer."""
        self._expected, self._real = self._expected + expected, self._real + tokens


class _Row:
    """The lines of one job in one sub-queue.

    tokens : forecast length of the lines that have not ended.  waiting_tokens : of the lines that wait
    """

    def __init__(
        self, job: _Job, sub_queue: SubQueue, numbers: npt.NDArray[np.int32], tokens: npt.NDArray[np.float32]
    ) -> None:
        self.job, self.sub_queue = job, sub_queue
        self._numbers, self._tokens, self._next = numbers, tokens, 0
        self._again: list[tuple[int, float]] = []  # lines that came back; the last is the next
        self.tokens = self.waiting_tokens = float(tokens.sum(dtype=np.float64))
        self.in_queue = 0

    @property
    def waits(self) -> bool:
        """Whether it has lines to hand over."""
        return bool(self._again) or self._next < len(self._numbers)

    def take(self) -> tuple[int, float]:
        """The next line: its number, and its tokens."""
        if self._again:
            number, tokens = self._again.pop()
        else:
            number, tokens = int(self._numbers[self._next]), float(self._tokens[self._next])
            self._next += 1
        self.waiting_tokens -= tokens
        self.in_queue += 1
        self.sub_queue.in_queue += 1
        return number, tokens

    def back(self, number: int, tokens: float) -> None:
        self._again.append((number, tokens))
        self.waiting_tokens += tokens
        self.left_queue()

    def left_queue(self) -> None:
        self.in_queue -= 1
        self.sub_queue.in_queue -= 1


def _no_slots(model: str) -> int:
    return 0


class ItemQueue:
    """The lines of all jobs, of which a few hundred are in the server's queue.

    slots  of the engines of a model; as many lines are handed over beside the waiting ones
    """

    def __init__(self, *, slots: Callable[[str], int] = _no_slots, lines_max: int = LINES_MAX) -> None:
        self._slots, self._lines_max = slots, lines_max
        self._jobs: dict[str, _Job] = {}
        self._sub_queues: dict[tuple[str, str], SubQueue] = {}
        self._added = 0
        self._in_queue: dict[tuple[str, int], tuple[float, _Row]] = {}  # lines handed over, with their tokens
        self._rates: dict[str, ItemRate] = {}  # by model

    @property
    def tokens_waiting(self) -> float:
        """Forecast length of all lines that have not entered the queue."""
        return sum([max(0.0, row.waiting_tokens) for job in self._jobs.values() for row in job.rows])

    @property
    def sub_queues(self) -> Iterable[SubQueue]:
        return self._sub_queues.values()

    # ---- jobs ----

    def __contains__(self, job_id: str) -> bool:
        """Whether a job has lines that have not ended."""
        return job_id in self._jobs

    def add(
        self,
        job_id: str,
        deadline_s: float,
        lines: Arranged,
        *,
        factor: float = 1.0,
        key: str = "",
        models: Sequence[str] = ("",),
    ) -> None:
        """Take a job with the lines that have no result yet.

        deadline_s : end of its window.  factor : of likely real lengths over the forecasts.  models : see Shapes
        """
        if not len(lines.numbers):
            return
        self._added += 1
        job = self._jobs[job_id] = _Job(job_id, deadline_s, self._added, lines, factor)
        for place in np.unique(lines.models):
            of_model = lines.models == place
            sub_queue = self._sub_queues.setdefault((key, models[place]), SubQueue(key, models[place]))
            row = _Row(job, sub_queue, lines.numbers[of_model], lines.tokens[of_model])
            job.rows.append(row)
            sub_queue.rows.append(row)
            sub_queue.rows.sort(key=lambda row: row.job.turn)

    def remove(self, job_id: str) -> list[int]:
        """Forget a job. Returns its lines that are in the queue or run."""
        numbers = [number for job, number in self._in_queue if job == job_id]
        for number in numbers:
            _, row = self._in_queue.pop((job_id, number))
            row.left_queue()
        job = self._jobs.pop(job_id, None)
        for row in job.rows if job is not None else ():
            self._leave(row)
        return numbers

    def _leave(self, row: _Row) -> None:
        sub_queue = row.sub_queue
        sub_queue.rows.remove(row)
        if not sub_queue.rows:
            del self._sub_queues[sub_queue.key, sub_queue.model]
            if not any(model == sub_queue.model for _, model in self._sub_queues):
                self._end_rate(sub_queue.model)

    def _end_rate(self, model: str) -> None:
        """Nobody has lines of the model any more. Models are clients' words: only those that have answered are kept."""
        if (rate := self._rates.get(model)) is not None and rate.tokens_per_s is None:
            del self._rates[model]

    # ---- lines ----

    def take(self, now_s: float) -> list[Handed]:
        """The lines that enter the queue now, in order."""
        handed: list[Handed] = []
        sub_queues = sorted(self._sub_queues.values(), key=lambda sub_queue: sub_queue.rows[0].job.turn)
        busy = [sub_queue for sub_queue in sub_queues if sub_queue.why_parked(now_s) is None]
        by_key, by_model = (
            Counter([sub_queue.key for sub_queue in busy]),
            Counter([sub_queue.model for sub_queue in busy]),
        )
        for sub_queue in busy:
            part = self._lines_max // (len(by_key) * by_key[sub_queue.key])
            slots = self._slots(sub_queue.model)
            most = max(part, min(SUB_QUEUE_LINES_LEAST, self._lines_max)) + -(-slots // by_model[sub_queue.model])
            if sub_queue.trouble is not None:
                most = 1  # whether the sub-queue's lines run again
            for row in sub_queue.rows:
                while sub_queue.in_queue < most and row.waits:
                    number, tokens = row.take()
                    self._in_queue[row.job.id, number] = tokens, row
                    handed.append(Handed(row.job.id, number, max(0.0, row.job.factor * row.waiting_tokens)))
        for model in {sub_queue.model for sub_queue in sub_queues}:
            is_busy = any(sub_queue.in_queue for sub_queue in sub_queues if sub_queue.model == model)
            self._rate(model).note(now_s, 0.0, busy=is_busy)
        return handed

    def _rate(self, model: str) -> ItemRate:
        return self._rates.setdefault(model, ItemRate())

    def look_at_s(self, now_s: float) -> float:
        """When a parked sub-queue is tried again; inf: none is."""
        return min(
            [
                sub_queue.until_s
                for sub_queue in self._sub_queues.values()
                if sub_queue.until_s > now_s and sub_queue.waits
            ],
            default=math.inf,
        )

    def sub_queue_of(self, job_id: str, number: int) -> SubQueue | None:
        """The sub-queue of a line that was handed over."""
        found = self._in_queue.get((job_id, number))
        return found[1].sub_queue if found is not None else None

    def sub_queues_of(self, job_id: str) -> Iterator[SubQueue]:
        """The sub-queues in which lines of the job wait, or were handed over."""
        job = self._jobs.get(job_id)
        return (row.sub_queue for row in (job.rows if job is not None else ()) if row.waits or row.in_queue)

    def back(self, job_id: str, number: int) -> None:
        """Return a line that was not served: it is the next of its job."""
        found = self._in_queue.pop((job_id, number), None)
        if found is not None:
            tokens, row = found
            row.back(number, tokens)

    def ended(self, job_id: str, number: int, now_s: float, tokens: float) -> None:
        """Note a line that has a result. tokens : of its answer; 0: it has none"""
        found = self._in_queue.pop((job_id, number), None)
        if found is None:
            return
        expected, row = found
        row.left_queue()
        row.tokens -= expected
        if tokens:
            row.job.observe(expected, tokens)
            row.sub_queue.clear()
        self._rate(row.sub_queue.model).note(now_s, tokens, busy=True)
        if not (row.waits or row.in_queue):
            row.job.rows.remove(row)
            self._leave(row)
            if not row.job.rows:
                del self._jobs[job_id]

    # ---- forecasts ----

    @property
    def has_rate(self) -> bool:
        """Whether a line has ended with an answer, so that the present rate is known."""
        return any(rate.tokens_per_s is not None for rate in self._rates.values())

    def forecast(self, job_id: str, wall_s: float, tokens_per_s_most: Callable[[str], float], now_s: float) -> Forecast:
        """Forecast the end of a job: at the present rate of lines, after all earlier lines of its models.

        A job that would be late runs as fast as its share allows, as its lines then count as online requests.
        Parked sub-queues begin when tried again; closed ones end at inf. Other keys' parked lines delay nobody.

        wall_s : now, on the clock of the ends of windows.  now_s : on the clock of `take`
        tokens_per_s_most : of a model: the rate of the job's share at the present competition
        """
        job = self._jobs[job_id]
        ends = []
        for row in job.rows:
            own = row.sub_queue
            begins_s = math.inf if own.closed is not None else wall_s + max(0.0, own.served_s - now_s)
            tokens = self._tokens_until(job.turn, own.model, now_s, own)
            ends.append(self._ends(own.model, job.deadline_s, tokens, begins_s, tokens_per_s_most(own.model)))
        return Forecast(max([end.ends_at_s for end in ends]), all(end.in_time for end in ends))

    def forecast_new(
        self, deadline_s: float, model: str, tokens: float, wall_s: float, tokens_per_s_most: float, now_s: float
    ) -> Forecast:
        """As `forecast`, of a job that would be added now. tokens : of all its lines"""
        tokens += self._tokens_until((deadline_s, self._added + 1), model, now_s)
        return self._ends(model, deadline_s, tokens, wall_s, tokens_per_s_most)

    def _tokens_until(self, turn: tuple[float, int], model: str, now_s: float, own: SubQueue | None = None) -> float:
        """Likely lengths of a model's lines up to a turn, without parked lines. own : whose lines always count"""
        return sum(
            [
                row.job.factor * row.tokens
                for one in self._sub_queues.values()
                if one.model == model and (one is own or one.why_parked(now_s) is None)
                for row in one.rows
                if row.job.turn <= turn
            ]
        )

    def _ends(
        self, model: str, deadline_s: float, tokens: float, begins_s: float, tokens_per_s_most: float
    ) -> Forecast:
        """tokens : of a job and all before it"""
        least_s = begins_s + (tokens / tokens_per_s_most if tokens_per_s_most > 0 else math.inf)
        rate = self._rates[model].tokens_per_s if model in self._rates else None
        likely_s = least_s if rate is None else begins_s + (tokens / rate if rate > 0 else math.inf)
        if likely_s > deadline_s:
            likely_s = max(deadline_s, least_s)
        return Forecast(max(likely_s, least_s), least_s <= deadline_s)


def arranged(lines: Shapes, *, barrier: bool, slots: int) -> Arranged:
    """The lines in the order in which they enter the queue; see the module. Some ms for 50,000 lines.

    slots : of the engines
    """
    _, group, counts = np.unique(lines.prefixes, return_inverse=True, return_counts=True)
    shared = np.where(counts[group] > 1, lines.prefixes, 0)  # a prefix of one line alone saves nothing
    order = np.lexsort((lines.numbers, -lines.tokens, shared))
    if not barrier:
        order = order[mixed(shared[order], _last_share(lines.tokens, slots))]
    models = lines.models if lines.models is not None else np.zeros(len(order), np.uint16)
    return Arranged(
        lines.numbers[order].astype(np.int32), lines.tokens[order].astype(np.float32), models[order].astype(np.uint16)
    )


def _last_share(tokens: npt.NDArray[np.floating], slots: int) -> float:
    """The share of the lines, the shortest, that take all slots for as long as the longest takes one."""
    ascending = np.sort(tokens)
    count = int(np.searchsorted(np.cumsum(ascending), slots * ascending[-1])) if len(tokens) else 0
    return min(LAST_SHARE_MOST, count / max(1, len(tokens)))


def mixed(prefixes: npt.NDArray[np.uint64], last_share: float) -> npt.NDArray[np.int64]:
    """An order in which each stretch of a prefix's lines has all lengths, but the shortest lines are last.

    prefixes : (n,) ascending; the longest line of each prefix is the first.  last_share : of the lines, to be last
    Returns (n,) places
    """
    _, group, counts = np.unique(prefixes, return_inverse=True, return_counts=True)
    places = np.arange(len(prefixes))
    begins = np.cumsum(counts) - counts
    within = places - begins[group]
    spread = (within + 1) * GOLDEN % 1.0
    is_last = within >= (counts - (last_share * counts).astype(int))[group]
    order = np.empty_like(places)
    order[np.lexsort((np.where(is_last, within, spread), is_last, group))] = places
    return order
