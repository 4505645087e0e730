"""Which lines of jobs enter the queue next, and when jobs will end. Reads no clock and does no I/O.

The scheduler decides when a line starts (scheduling/background.py); it needs to see a few hundred lines only. So jobs
of any size cost it the same, and a line that was not handed over yet needs nothing but its number.

    order of jobs   by the ends of their windows
    order of lines  those with the same prefix together, for an engine computes it once; then by forecast lengths: mixed
                    where slots refill, so that the need for memory is even, with the shortest last, for as long as the
                    longest answer may take: forecasts err, and a long answer that begins late ends alone; the longest
                    first where batches run to their end
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmserve.scheduling.rates import LineRate

LINES_MAX = 256  # of all jobs, in the queue or on engines, beside the engines' slots
FACTOR_LINES = 16.0  # answers as many as which the first guess of their lengths counts
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # multiples of it, modulo 1, spread evenly however many are taken
LAST_SHARE_MOST = 0.5  # of a job's lines, the shortest, which run last


class Shapes(NamedTuple):
    """Lines as far as their places go: (n,) arrays.

    numbers : int64, each once.  tokens : float64, forecast lengths.  prefixes : uint64, hashes of how prompts begin
    """

    numbers: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.float64]
    prefixes: npt.NDArray[np.uint64]


class Arranged(NamedTuple):
    """Lines in the order in which they enter the queue. tokens : their forecast lengths, likewise"""

    numbers: list[int]
    tokens: list[float]


class Handed(NamedTuple):
    """A line that enters the queue. after_tokens : forecast length of all lines of its job that follow"""

    job: str
    number: int
    after_tokens: float


class Forecast(NamedTuple):
    """When a job ends by its forecast. in_time : whether that is within its window"""

    ends_at_s: float
    in_time: bool


class _Job:
    """deadline_s : end of its window.  turn : among jobs, ascending.  tokens : of all its lines that have not ended.
    waiting_tokens : of those that wait.  factor : of real lengths over forecasts, as the job's answers tell
    """

    def __init__(self, job_id: str, deadline_s: float, number: int, lines: Arranged, factor: float) -> None:
        self.id, self.deadline_s, self.turn = job_id, deadline_s, (deadline_s, number)
        self._lines, self._next = lines, 0
        self._again: list[tuple[int, float]] = []  # lines that came back; the last is the next
        self.tokens = self.waiting_tokens = sum(lines.tokens)
        self._expected = FACTOR_LINES * self.tokens / len(lines.tokens)  # of answers that count as seen at the start
        self._real = factor * self._expected

    @property
    def factor(self) -> float:
        return self._real / self._expected if self._expected else 1.0

    def observe(self, expected: float, tokens: float) -> None:
        """Note the real length of an answer."""
        self._expected, self._real = self._expected + expected, self._real + tokens

    @property
    def waits(self) -> bool:
        """Whether it has lines to hand over."""
        return bool(self._again) or self._next < len(self._lines.numbers)

    def take(self) -> tuple[int, float]:
        """The next line: its number, and its tokens."""
        if self._again:
            number, tokens = self._again.pop()
        else:
            number, tokens = self._lines.numbers[self._next], self._lines.tokens[self._next]
            self._next += 1
        self.waiting_tokens -= tokens
        return number, tokens

    def back(self, number: int, tokens: float) -> None:
        self._again.append((number, tokens))
        self.waiting_tokens += tokens


class Feeder:
    """Keeps a few hundred lines in the queue.

    slots  of the engines: so many lines may run beside those that wait
    """

    def __init__(self, *, slots: int = 0, lines_max: int = LINES_MAX) -> None:
        self.slots = slots
        self._lines_max = lines_max
        self._jobs: dict[str, _Job] = {}
        self._added = 0
        self._in_queue: dict[tuple[str, int], float] = {}  # lines that were handed over, with their tokens
        self._rate = LineRate()

    @property
    def tokens_waiting(self) -> float:
        """Forecast length of all lines that have not entered the queue."""
        return sum([max(0.0, job.waiting_tokens) for job in self._jobs.values()])

    # ---- jobs ----

    def __contains__(self, job_id: str) -> bool:
        """Whether a job has lines that have not ended."""
        return job_id in self._jobs

    def add(self, job_id: str, deadline_s: float, lines: Arranged, *, factor: float = 1.0) -> None:
        """Take a job with the lines that have no result yet.

        deadline_s : end of its window.  factor : of likely real lengths over the forecasts
        """
        if lines.numbers:
            self._added += 1
            self._jobs[job_id] = _Job(job_id, deadline_s, self._added, lines, factor)

    def remove(self, job_id: str) -> list[int]:
        """Forget a job. Returns its lines that are in the queue or run."""
        self._jobs.pop(job_id, None)
        numbers = [number for job, number in self._in_queue if job == job_id]
        for number in numbers:
            del self._in_queue[job_id, number]
        return numbers

    # ---- lines ----

    def take(self, now_s: float) -> list[Handed]:
        """The lines that enter the queue now, in order."""
        handed: list[Handed] = []
        room = self._lines_max + self.slots - len(self._in_queue)
        for job in sorted(self._jobs.values(), key=lambda job: job.turn):
            while room > 0 and job.waits:
                number, tokens = job.take()
                self._in_queue[job.id, number] = tokens
                handed.append(Handed(job.id, number, max(0.0, job.factor * job.waiting_tokens)))
                room -= 1
        self._rate.note(now_s, 0.0, busy=bool(self._in_queue))
        return handed

    def back(self, job_id: str, number: int) -> None:
        """Let a line wait again that was not served: it is the next of its job."""
        tokens = self._in_queue.pop((job_id, number), None)
        if tokens is not None:
            self._jobs[job_id].back(number, tokens)

    def ended(self, job_id: str, number: int, now_s: float, tokens: float) -> None:
        """Note a line that has a result. tokens : of its answer; 0: it has none"""
        expected = self._in_queue.pop((job_id, number), None)
        if expected is None:
            return
        job = self._jobs[job_id]
        job.tokens -= expected
        if tokens:
            job.observe(expected, tokens)
        self._rate.note(now_s, tokens, busy=True)
        if not (job.waits or any(other == job_id for other, _ in self._in_queue)):
            del self._jobs[job_id]

    # ---- forecasts ----

    @property
    def has_rate(self) -> bool:
        """Whether a line has ended with an answer, so that the present rate is known."""
        return self._rate.tokens_per_s is not None

    def forecast(self, job_id: str, now_s: float, tokens_per_s_most: float) -> Forecast:
        """When a job ends: at the present rate of lines, after all that comes before it. If that is late, as fast as
        its share allows, for its lines then count as online requests.

        tokens_per_s_most : what its share would get if each share that waits now went on waiting
        """
        job = self._jobs[job_id]
        before = [other for other in self._jobs.values() if other.turn <= job.turn]
        return self._ends(
            job.deadline_s, sum([other.factor * other.tokens for other in before]), now_s, tokens_per_s_most
        )

    def forecast_new(self, deadline_s: float, tokens: float, now_s: float, tokens_per_s_most: float) -> Forecast:
        """As `forecast`, of a job that is about to be added. tokens : of all its lines"""
        before = [other for other in self._jobs.values() if other.deadline_s <= deadline_s]
        tokens += sum([other.factor * other.tokens for other in before])
        return self._ends(deadline_s, tokens, now_s, tokens_per_s_most)

    def _ends(self, deadline_s: float, tokens: float, now_s: float, tokens_per_s_most: float) -> Forecast:
        """tokens : of a job and all before it"""
        least_s = now_s + (tokens / tokens_per_s_most if tokens_per_s_most > 0 else math.inf)
        rate = self._rate.tokens_per_s
        likely_s = least_s if rate is None else now_s + (tokens / rate if rate > 0 else math.inf)
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
    return Arranged(lines.numbers[order].tolist(), lines.tokens[order].tolist())


def _last_share(tokens: npt.NDArray[np.float64], slots: int) -> float:
    """The share of the lines, the shortest, that take all slots for as long as the longest takes one."""
    ascending = np.sort(tokens)
    count = int(np.searchsorted(np.cumsum(ascending), slots * ascending[-1])) if len(tokens) else 0
    return min(LAST_SHARE_MOST, count / max(1, len(tokens)))


def mixed(prefixes: npt.NDArray[np.uint64], last_share: float) -> npt.NDArray[np.int64]:
    """Places of lines so that each stretch of those of a prefix has all lengths, but for the shortest, which are last.

    prefixes : (n,) ascending; of each prefix, the longest line is the first.  last_share : of the lines, which are last
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
