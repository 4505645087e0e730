"""What silence of an answer is normal for an engine now, and which answers the engine has lost. Pure.

An answer is silent while nothing of it arrives but comments and pings. A long silence has many causes that heal: a
prompt of 100,000 tokens, a model that is loaded, a collection of garbage, a full KV cache, a tool call that the engine
writes as a whole, a paused machine. So a silence is compared with what the engine does meanwhile:

    its clock runs only while the engine works     it is heard on other answers, or it has only this one and answers
                                                   probes. Where all answers stand still at once, the engine is the
                                                   suspect, and its probes decide (engine_state.py)
    the answer has been overtaken                  the engine has begun NEWER answers to requests of the same model that
                                                   came after the last sign of this one. An engine that is out of memory
                                                   or loads the model begins none
    the silence is far longer than the normal one  the longest silences of the last answers, the prompt at the speed of
                                                   long prompts, and the answer by its forecast, as if the
                                                   engine wrote it as a whole: FACTOR times that, and `floor_s` at least

The engine may also tell how many requests it has. Those that are not silent are among them; where it has told for
`floor_s` in all that it has no more (`alone_s` while nothing of it is heard, for an engine that stands still may go on
telling what it had before), the silent ones are lost, streamed or not: nothing else need be known of them. Its word
counts once it has included COUNTS_TRUSTED silent answers in a row which then went on, for some engines count the
requests of one process of several.

An answer that was not overtaken has ALONE times that, and `alone_s` at least. An answer that is not streamed is silent
to its end; only a bound of its length says when that is late, as one answer in thousands is many times as long as its
forecast. Before ANSWERS_MIN answers, and beyond all of this, the limits of the settings hold.

`Silences` learns from what is seen of an engine's answers at intervals, so an event costs nothing: a silence shorter
than an interval is of no interest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

ANSWERS_MIN = 128  # of a queue on an engine, before its silences are judged
NEWER = 8  # answers that have begun later, and earlier than this one goes on
FACTOR, ALONE = 4.0, 8.0
KEPT = 1024  # answers after which the older half of the longest silences is forgotten
QUEUES_MAX = 64  # of one engine, that are remembered
STEP_S_MAX = 10.0  # of the clock, between two looks: a pause of this program is no silence
LONG_PROMPT = 2048  # tokens; shorter prompts say nothing about the speed at which prompts are read
PROMPT_S = 0.02  # of a token of a long prompt, before such prompts were seen: a CPU's speed
TOKENS_MIN = 16  # of an answer that tells the pace
COUNTS_TRUSTED = 64  # answers in a row, each of which the engine had counted before it went on
LOADED_S = 240.0  # without a sign of a model, after which the engine may have to load it again


@dataclass(frozen=True, slots=True)
class Patience:
    """The shortest silences that end an answer.

    floor_s  of an answer that newer ones have overtaken
    alone_s  of another
    """

    floor_s: float = 20.0
    alone_s: float = 120.0

    @property
    def alone_share(self) -> float:
        return self.floor_s / self.alone_s


class Worst:
    """The second largest of the last KEPT to 2 KEPT values: one outlier is ignored. 0 before two values."""

    __slots__ = ("_count", "_old", "_young")

    def __init__(self) -> None:
        self._old = self._young = (0.0, 0.0)  # the two largest, the larger first
        self._count = 0

    def note(self, value: float) -> None:
        first, second = self._young
        if value > second:
            self._young = (value, first) if value > first else (first, value)
        self._count += 1
        if self._count >= KEPT:
            self._old, self._young, self._count = self._young, (0.0, 0.0), 0

    @property
    def value(self) -> float:
        (old, old_second), (young, young_second) = self._old, self._young
        return max(young_second, old_second, min(old, young))


class Run:
    """One answer of an engine, as it is seen from time to time.

    queue          of the scheduler
    is_stream      whether the answer shows its progress
    prompt_tokens  estimated
    likely         tokens that the answer hardly exceeds, by its forecast; 0: there is none
    bound          tokens that the answer cannot exceed; inf: none is known
    turn           the smaller, the earlier an engine by priority runs the request; 0 for all others
    heard_s        the last sign of the answer, at first that the request was sent
    began          whether content has come
    tokens         so far; of a complete answer all
    complete       whether the answer has ended well
    """

    __slots__ = (
        *("began", "bound", "complete", "heard_s", "is_stream", "likely", "prompt_tokens", "queue", "tokens", "turn"),
        *(
            "counted",
            "from_s",
            "from_tokens",
            "had_begun",
            "longest_s",
            "missed_s",
            "overtaken",
            "sent_s",
            "sign_s",
            "silent_s",
        ),
    )

    def __init__(
        self,
        queue: str,
        *,
        is_stream: bool = True,
        prompt_tokens: float = 0.0,
        likely: float = 0.0,
        bound: float = math.inf,
        turn: float = 0.0,
    ) -> None:
        self.queue, self.is_stream, self.prompt_tokens = queue, is_stream, prompt_tokens
        self.likely, self.bound, self.turn = likely, bound, turn
        self.heard_s = self.tokens = 0.0
        self.began = self.complete = False
        # of Silences
        self.sent_s: float | None = None  # the request came not before; None: the run was not seen yet
        self.from_s = self.from_tokens = 0.0  # since when there have been so many tokens, at first that it was sent
        self.sign_s = 0.0  # the last sign that was seen
        self.silent_s = 0.0  # since then, on the engine's clock
        self.longest_s = 0.0  # silence before the content, or within it
        self.had_begun = False
        self.overtaken = 0  # newer answers that have begun since the last sign
        self.counted = False  # by the engine, at some look since the last sign
        self.missed_s = 0.0  # for which the engine has told that it has no silent request, since it last had all

    @property
    def rest(self) -> float:
        """Tokens that the engine may write as a whole from here on: all of the forecast, which is often short."""
        return min(max(self.likely, self.tokens), max(0.0, self.bound - self.tokens))


class Normal:
    """What is normal for the answers of one queue on one engine.

    answers  number of complete answers so far
    heard_s  the last sign of any of them
    """

    __slots__ = ("_begins", "_gaps", "_lengths", "_prompt_s", "_seconds", "_tokens", "_whole", "answers", "heard_s")

    def __init__(self) -> None:
        self.answers, self.heard_s = 0, -math.inf
        self._begins, self._gaps, self._whole = Worst(), Worst(), Worst()
        self._prompt_s, self._lengths = Worst(), Worst()
        self._seconds = self._tokens = 0.0

    @property
    def token_s(self) -> float:
        """Mean seconds of a token."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def began(self, run: Run) -> None:
        """Learn from the first content of a stream."""
        self._begins.note(run.longest_s)
        if run.prompt_tokens >= LONG_PROMPT:
            self._prompt_s.note(run.longest_s / run.prompt_tokens)

    def ended(self, run: Run, now_s: float) -> None:
        """Learn from a complete answer."""
        self.answers += 1
        (self._gaps if run.is_stream else self._whole).note(run.longest_s)
        self._lengths.note(run.tokens)
        tokens = min(run.tokens, run.bound) - run.from_tokens
        if tokens >= TOKENS_MIN:
            if self.answers % KEPT == 0:
                self._seconds, self._tokens = self._seconds / 2.0, self._tokens / 2.0
            self._seconds += now_s - run.from_s
            self._tokens += tokens

    def silence_s(self, run: Run) -> float:
        """The longest silence that is normal for the answer now; inf: none is known."""
        if not run.is_stream:
            return self.whole_s(run) if run.bound < math.inf else math.inf
        rest = run.rest if run.likely else min(self._lengths.value, max(0.0, run.bound - run.tokens))
        before = self._gaps.value if run.began else self._begins.value + self._prompt_time_s(run)
        return before + self.token_s * rest

    def whole_s(self, run: Run) -> float:
        """The longest time that is normal for an answer that is not streamed, whether its length has a bound or not."""
        rest = self.token_s * run.bound if run.bound < math.inf else 0.0
        return self._whole.value + self._prompt_time_s(run) + rest

    def _prompt_time_s(self, run: Run) -> float:
        if run.prompt_tokens < LONG_PROMPT:
            return 0.0
        return run.prompt_tokens * (self._prompt_s.value or PROMPT_S)


class Silences:
    """The silences of one engine's answers.

    patience : the shortest ones that end an answer
    """

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self._normal: OrderedDict[str, Normal] = OrderedDict()  # by queue, the one heard last at the end
        self._looked_s = math.inf
        self._counted = 0  # silent answers in a row that the engine had counted, and that went on

    def of(self, queue: str) -> Normal | None:
        """What is normal for a queue; None: it was not heard so far."""
        return self._normal.get(queue)

    def look(
        self,
        now_s: float,
        runs: Collection[Run],
        ended: Iterable[Run] = (),
        *,
        probed: bool = True,
        told: int | None = None,
    ) -> list[Run]:
        """Learn from the runs of the engine as they are now, and return those that the engine has lost.

        now_s   on the clock of `heard_s`
        ended   those of the last look that run no more
        probed  whether the engine has just answered a probe
        told    the requests that the engine has, running or waiting, by its own word in the probe; None: it told none
        """
        since_s, self._looked_s = self._looked_s, now_s
        step_s = min(max(0.0, now_s - since_s), STEP_S_MAX)
        begun: dict[str, list[tuple[float, float]]] = {}  # (sent, turn) of the answers that have begun, by queue
        is_heard = self._hear_ends(ended, now_s, begun)
        for run in runs:
            is_heard = self._hear(run, since_s, begun, min(step_s, max(0.0, now_s - run.heard_s))) or is_heard
        works = is_heard or (probed and len(runs) == 1)
        if told is not None:
            self._miss(runs, told, since_s, step_s * (1.0 if is_heard else self.patience.alone_share))
        newest = {queue: sorted(sent_s for sent_s, _ in entries) for queue, entries in begun.items()}
        lost = []
        for run in runs:
            if run.sign_s < since_s:  # else it is silent since the last look
                run.silent_s += step_s if works else 0.0
                if run.overtaken < NEWER and run.queue in newest:
                    run.overtaken += _newer(run, newest[run.queue], begun[run.queue])
                if self._is_lost(run):
                    lost.append(run)
        return lost

    def allows(self, run: Run) -> float:
        """The silence that ends the answer, in seconds of the engine's clock; inf: only the settings do."""
        normal = self._normal.get(run.queue)
        if normal is None or normal.answers < ANSWERS_MIN:
            return math.inf
        if run.overtaken >= NEWER:
            return max(self.patience.floor_s, FACTOR * normal.silence_s(run))
        if not run.began and not self._is_loaded(run, normal):
            return math.inf
        return max(self.patience.alone_s, ALONE * normal.silence_s(run))

    def may_be_busy(self, now_s: float, runs: Iterable[Run]) -> bool:
        """Whether an engine that answers no probe may be busy with answers that are not streamed."""
        for run in runs:
            normal = self._normal.get(run.queue)
            if run.is_stream or normal is None or not normal.answers:
                continue
            if now_s - max(run.heard_s, normal.heard_s) < min(self.patience.alone_s, FACTOR * normal.whole_s(run)):
                return True
        return False

    def _miss(self, runs: Collection[Run], told: int, since_s: float, step_s: float) -> None:
        """Count the time for which the engine has told that it has none of the silent runs.

        told : requests that it has; of those that were sent since the last look, some may be on their way. Where it has
        some of the silent ones, nothing tells which.  step_s : since the last look; less while the engine is not heard
        """
        silent = [run for run in runs if run.sign_s < since_s]
        missing = sum(run.sent_s is not None and run.sent_s < since_s for run in runs) - told
        if missing <= 0:
            for run in silent:
                run.missed_s, run.counted = 0.0, True
        elif missing >= len(silent):
            for run in silent:
                run.missed_s += step_s

    def _went_on(self, run: Run) -> None:
        """Take note of a sign of a run: a count that did not include the run was wrong."""
        if run.missed_s:
            self._counted = 0
        elif run.counted:
            self._counted += 1
        run.missed_s, run.counted = 0.0, False

    def _is_lost(self, run: Run) -> bool:
        if run.missed_s > self.patience.floor_s and self._counted >= COUNTS_TRUSTED:
            return True
        return run.silent_s > self.patience.floor_s and run.silent_s > self.allows(run)

    def _is_loaded(self, run: Run, normal: Normal) -> bool:
        """Whether the engine has lately worked for the model, and for no other since."""
        return next(reversed(self._normal)) == run.queue and run.sign_s - normal.heard_s < LOADED_S

    def _hear_ends(self, ended: Iterable[Run], now_s: float, begun: dict[str, list[tuple[float, float]]]) -> bool:
        is_heard = False
        for run in ended:
            if run.complete and run.sent_s is not None:
                is_heard = True
                self._went_on(run)
                normal = self._heard(run.queue, now_s)
                run.longest_s = max(run.longest_s, run.silent_s)
                if not run.had_begun:
                    begun.setdefault(run.queue, []).append((run.sent_s, run.turn))
                    if run.is_stream:
                        normal.began(run)
                        run.longest_s = 0.0
                normal.ended(run, now_s)
        return is_heard

    def _hear(self, run: Run, since_s: float, begun: dict[str, list[tuple[float, float]]], new_s: float) -> bool:
        """Take note of a sign. new_s : silence since the sign, if there is one.  Returns whether the engine is heard"""
        is_new = run.sent_s is None
        if is_new:
            run.sent_s = min(since_s, run.heard_s)
            run.from_s = run.sign_s = run.heard_s
            run.silent_s = new_s
        elif run.heard_s > run.sign_s:
            run.longest_s = max(run.longest_s, run.silent_s)
            run.sign_s, run.silent_s, run.overtaken = run.heard_s, new_s, 0
            self._went_on(run)
        else:
            return False
        if run.began and not run.had_begun:
            run.had_begun, run.from_s, run.from_tokens = True, run.heard_s, run.tokens
            self._heard(run.queue, run.heard_s).began(run)
            assert run.sent_s is not None
            begun.setdefault(run.queue, []).append((run.sent_s, run.turn))
            run.longest_s = 0.0
        elif not is_new:
            self._heard(run.queue, run.heard_s)
        return run.began or not is_new

    def _heard(self, queue: str, at_s: float) -> Normal:
        normal = self._normal.get(queue)
        if normal is None:
            normal = self._normal[queue] = Normal()
            if len(self._normal) > QUEUES_MAX:
                self._normal.popitem(last=False)
        self._normal.move_to_end(queue)
        normal.heard_s = max(normal.heard_s, at_s)
        return normal


def _newer(run: Run, newest: list[float], begun: list[tuple[float, float]]) -> int:
    """How many of the answers that have begun are to requests that came after the last sign of the run, and have no
    earlier turn. newest : when these requests came, ascending
    """
    newer = len(newest) - bisect_left(newest, run.sign_s)
    if newer and run.turn:
        newer = sum(sent_s >= run.sign_s and turn >= run.turn for sent_s, turn in begun)
    return newer
