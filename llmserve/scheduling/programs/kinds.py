"""What is still to come of a turn, learned from ended turns of the same kind of program.

A kind is a system prompt with its tools. Of each kind, and of all together, the mean number of steps that remained is
learned by the step at which a turn stood, in buckets 1, 2, 3-4, 5-8, ...; and the mean tokens that a further step adds
to the prompt and answers. A kind that was seen little is shrunk to all.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

KINDS_MAX = 4096  # kinds that are remembered, the last used
BUCKETS = 16
SHRINK = 4.0  # turns: the weight of all kinds in the means of one
MEMORY = 512  # observations after which the weight of an earlier one has fallen to a third
KEPT_MAX = 64  # kinds that outlive a restart, the last used

Weighed = tuple[float, float]
"""The sum of a mean's observations, and their weight."""


class LearntKind(msgspec.Struct, frozen=True):
    """What was learnt of one kind, or of all together. remaining : by bucket"""

    remaining: tuple[Weighed, ...] = ()
    growth: Weighed = (0.0, 0.0)
    answer: Weighed = (0.0, 0.0)


NEW = LearntKind()


class LearntKinds(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was learnt of kinds before the start. kinds : by kind, the last used is last"""

    every: LearntKind = NEW
    kinds: dict[int, LearntKind] = {}


NOTHING = LearntKinds()


class _Mean:
    """A mean whose observations lose weight. weight : of all so far, up to MEMORY"""

    __slots__ = ("sum", "weight")

    def __init__(self, learnt: Weighed = (0.0, 0.0)) -> None:
        self.sum, self.weight = learnt

    def learnt(self) -> Weighed:
        return self.sum, self.weight

    def observe(self, value: float, times: float = 1.0) -> None:
        keep = 1.0 - times / MEMORY if times < MEMORY else 0.0
        self.sum, self.weight = keep * self.sum + times * value, keep * self.weight + times

    def towards(self, value: float) -> float:
        """The mean, shrunk to this value."""
        return (self.sum + SHRINK * value) / (self.weight + SHRINK)

    def value(self, guess: float) -> float:
        """The mean; before any observation the guess."""
        return self.sum / self.weight if self.weight else guess


class _Kind:
    __slots__ = ("answer", "growth", "remaining")

    def __init__(self, learnt: LearntKind = NEW) -> None:
        before = learnt.remaining[:BUCKETS]
        self.remaining = [*map(_Mean, before), *[_Mean() for _ in range(BUCKETS - len(before))]]
        self.growth, self.answer = _Mean(learnt.growth), _Mean(learnt.answer)

    def learnt(self) -> LearntKind:
        buckets = max([place for place, mean in enumerate(self.remaining, 1) if mean.weight], default=0)
        remaining = tuple([mean.learnt() for mean in self.remaining[:buckets]])
        return LearntKind(remaining, self.growth.learnt(), self.answer.learnt())


class Further:
    """The steps that a turn still needs after the present one.

    steps   their number, as a mean.  growth : tokens that each adds to the prompt, with the answer before.
    answer  tokens of each answer
    """

    __slots__ = ("answer", "growth", "steps")

    def __init__(self, steps: float, growth: float, answer: float) -> None:
        self.steps, self.growth, self.answer = steps, growth, answer


class Kinds:
    """All kinds of programs. learnt : before the start"""

    def __init__(self, learnt: LearntKinds = NOTHING) -> None:
        self._all = _Kind(learnt.every)
        self._kinds = OrderedDict([(kind, _Kind(own)) for kind, own in learnt.kinds.items()])

    def learnt(self) -> LearntKinds:
        """What was learnt so far, of the kinds that were used last."""
        return LearntKinds(
            self._all.learnt(), {kind: own.learnt() for kind, own in list(self._kinds.items())[-KEPT_MAX:]}
        )

    def further(self, kind: int, step: int) -> Further:
        """What remains of a turn of the kind after its step. step : 1, 2, ..."""
        every, own = self._all, self._kinds.get(kind)
        bucket = _bucket(step)
        steps, growth, answer = every.remaining[bucket].value(0.0), every.growth.value(0.0), every.answer.value(0.0)
        if own is None:
            return Further(steps, growth, answer)
        return Further(own.remaining[bucket].towards(steps), own.growth.towards(growth), own.answer.towards(answer))

    def stepped(self, kind: int, growth: float | None, answer: float) -> None:
        """Learn from a step that has ended. growth : None for the first step of a program"""
        for each in (self._all, self._of(kind)):
            if growth is not None:
                each.growth.observe(growth)
            each.answer.observe(answer)

    def turn_ended(self, kind: int, steps: int) -> None:
        """Learn from a turn that had so many steps."""
        first = 1
        while first <= steps:  # a bucket at once: its steps are first..last
            bucket = _bucket(first)
            last = min(steps, 1 << bucket) if bucket < BUCKETS - 1 else steps
            count = last - first + 1
            mean = steps - 0.5 * (first + last)
            for each in (self._all, self._of(kind)):
                each.remaining[bucket].observe(mean, float(count))
            first = last + 1

    def _of(self, kind: int) -> _Kind:
        own = self._kinds.get(kind)
        if own is None:
            own = self._kinds[kind] = _Kind()
            if len(self._kinds) > KINDS_MAX:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(kind)
        return own


def _bucket(step: int) -> int:
    """0: step 1; 1: 2; 2: 3 and 4; 3: 5 to 8; ..."""
    return min(BUCKETS - 1, max(0, step - 1).bit_length())
