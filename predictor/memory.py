"""Requests of one template or application, forecast from their own recent lengths.

A request has a chain of keys, coarse to fine: its model's recent requests; its application (system prompt and stop
strings); the first 32 characters, the first 128, and the whole of its text. Each key remembers its last lengths, and
how well it would have forecast them, beside the forecast that stood without it. From coarse to fine, a key whose own
forecast was clearly better takes over; so a predictor is only overruled where it has been seen to be worse.

An answer teaches the key that forecast it, and the finer ones. The coarser ones, and the predictor's correction, learn
only one in OVERRULED_LEARNT: from all they would learn the lengths of templates that they do not serve, and forecast
them for the requests that they do; from none they would stay wrong for ever once a finer key knew better.

Only hashes and lengths are kept, never a text.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from bins.calibration import midpoints
from predictor.prompt import Prompt
from predictor.quantiles import LEVELS, MIDDLE, Logs, ascending, crps, sample_quantiles

PREFIXES = (32, 128)
"""Characters of a text that make a template."""
SCORED_MIN = 4
"""Lengths that a key holds before its forecasts are scored; and scores before a predictor is overruled."""
TRUSTED_MIN = 8
"""Lengths that a key holds before it may take over."""
MARGIN = 0.9
"""A key takes over when its score is below this share of the standing forecast's: less is within chance."""
BORROWED = 2.0
"""How many lengths the standing forecast's spread is worth beside the key's own."""

OVERRULED_LEARNT = 8

_TEXT_END = 4096  # of a longer text only the two ends and the length are hashed: time on a request's path is bounded
_LEVELS = midpoints(LEVELS)
_NOTHING_KNOWN: Logs = tuple(NormalDist().inv_cdf(float(p)) for p in _LEVELS)  # a spread of e, for a first length

K = TypeVar("K")
V = TypeVar("V")


class RecentlyUsed(Generic[K, V]):
    """A dictionary of at most `size` entries; the one that was not used for longest goes first. 0 keeps nothing."""

    def __init__(self, size: int, make: Callable[[], V]) -> None:
        assert size >= 0
        self._size, self._make = size, make
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The entry, if there is one. Asking is no use: what never ends would else displace what is learnt."""
        return self._entries.get(key)

    def used(self, key: K) -> V:
        """The entry, made if there is none, and now the last to go."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._make()
            if len(self._entries) > self._size:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        return entry


@dataclass(slots=True)
class Duel:
    """Scores of a key's own forecasts and of those that stood without it, on the same answers.

    Means over about the last `window` scores; later ones weigh more, so that a change is noticed.
    """

    window: int
    own: float = 0.0
    standing: float = 0.0
    count: int = 0

    def score(self, own: float, standing: float) -> None:
        self.count += 1
        rate = 1 / min(self.count, self.window)
        self.own += rate * (own - self.own)
        self.standing += rate * (standing - self.standing)


class Neighbours:
    """What is remembered of the requests of one key.

    size : lengths that are kept.  least : how many make the first forecast.
    """

    __slots__ = (
        "_at", "_cap", "_capped", "_least", "_logs", "_quantiles", "_unused", "count", "over_others", "over_predictor"
    )  # fmt: skip

    def __init__(self, size: int, least: int) -> None:
        self._logs = np.empty(size)
        self._capped = np.zeros(size, dtype=bool)
        self._least = least
        self._quantiles: list[float] = []
        self._cap = 0.0  # where these are nan, all that is known is that it would be more than this
        self._unused = 0  # lengths since the quantiles were taken
        self._at = 0
        self.count = 0
        self.over_others = Duel(max(1, size // 2))  # against coarser keys alone
        self.over_predictor = Duel(max(1, size // 2))  # against what began with a predictor's forecast

    def learn(self, actual: float, capped: bool) -> None:
        self._logs[self._at], self._capped[self._at] = actual, capped
        self._at = (self._at + 1) % self._logs.size
        self.count = min(self.count + 1, self._logs.size)
        self._unused += 1
        if self.count >= self._least and self._unused > min(15, self.count // 8):
            logs, flags = self._logs[: self.count], self._capped[: self.count]
            self._quantiles = sample_quantiles(logs, flags, _LEVELS).tolist()
            self._cap = float(np.max(logs, where=flags, initial=0.0))
            self._unused = 0

    def says(self, standing: Logs | None) -> Logs | None:
        """The key's own forecast: its quantiles, and a little of the spread of what stands without it; or None.

        A few equal lengths are no certainty: of n lengths' forecast, BORROWED / (n + BORROWED) is the standing one,
        moved to the key's own median. Quantiles that no answer reached before its cap are the standing forecast's,
        but never below the caps.
        """
        if not self._quantiles:
            return None
        own, other = self._quantiles, standing or _NOTHING_KNOWN
        if own[-1] != own[-1]:  # nan
            own = self._completed(standing)
        kept = self.count / (self.count + BORROWED)
        lent = 1 - kept
        shift = lent * (own[MIDDLE] - other[MIDDLE])
        return ascending([kept * a + lent * b + shift for a, b in zip(own, other, strict=True)])

    def _completed(self, standing: Logs | None) -> list[float]:
        """The quantiles, with what is known where there are none."""
        cap, middle = self._cap, self._quantiles[MIDDLE]
        other = standing or tuple([cap + log for log in _NOTHING_KNOWN])
        shift = 0.0 if middle != middle else middle - other[MIDDLE]
        return [max(b + shift, cap) if a != a else a for a, b in zip(self._quantiles, other, strict=True)]

    def takes_over(self, predicted: bool) -> bool:
        """Unseen in a duel it does, but not from a predictor: then the finer key is likely the better."""
        duel = self.over_predictor if predicted else self.over_others
        if self.count < TRUSTED_MIN or duel.count < SCORED_MIN:
            return self.count >= TRUSTED_MIN and not predicted
        return duel.own < MARGIN * duel.standing


class Said(NamedTuple):
    """What one key would have forecast, and what stood without it."""

    key: bytes
    own: Logs
    standing: Logs


class Verdict(NamedTuple):
    """The forecast that stands in the end, who made it, and what each key said; () and "" when nothing is known.

    overruled : the keys coarser than the one whose forecast stands, if it is an application's or a template's.
    """

    logs: Logs
    source: str
    said: tuple[Said, ...]
    overruled: tuple[bytes, ...] = ()


class Memory:
    """The keys of all models. keys_max, models_max : how many are remembered; a model's own lengths count there."""

    def __init__(self, keys_max: int, lengths_per_key: int, window: int, models_max: int) -> None:
        self._keys = RecentlyUsed[bytes, Neighbours](keys_max, lambda: Neighbours(lengths_per_key, SCORED_MIN))
        self._recent = RecentlyUsed[bytes, Neighbours](models_max, lambda: Neighbours(window, 1))
        self._overruled = 0

    def __len__(self) -> int:
        return len(self._keys)

    def judge(self, chain: tuple[bytes, ...], predicted: Logs | None) -> Verdict:
        """chain : as `keys_of` gives it.  predicted : what a predictor says, if there is one."""
        standing, source = predicted, "predictor" if predicted else ""
        said: list[Said] = []
        place = 0
        recent = self._recent.get(chain[0]) if not standing else None  # it ranks nothing, a poor predictor does
        if recent and (own := recent.says(None)):
            standing, source = own, "recent"
        for finer, key in enumerate(chain[1:], 1):
            neighbours = self._keys.get(key)
            own = neighbours.says(standing) if neighbours and standing else None
            if neighbours and standing and own:
                said.append(Said(key, own, standing))
                if neighbours.takes_over(predicted is not None):
                    standing, source, place = own, "memory", finer
        return Verdict(standing or (), source, tuple(said), chain[:place])

    def learn(
        self,
        chain: tuple[bytes, ...],
        verdict: Verdict,
        actual: float,
        capped: bool,
        predicted: bool,
    ) -> bool:
        """Scores what was said before the length was known, and only then remembers the length.

        Returns whether the coarsest learnt of it too, and a predictor's correction should.
        """
        self._overruled += bool(verdict.overruled)
        passed = verdict.overruled if self._overruled % OVERRULED_LEARNT else ()
        self._score([each for each in verdict.said if each.key not in passed], actual, capped, predicted)
        recent = self._recent.used(chain[0])
        if not passed:
            recent.learn(actual, capped)
        opened = True
        for key in chain[1:]:
            # A finer key is opened once its coarser one has been seen before: prompts that never come again take one.
            known = self._keys.get(key) is not None
            if not (known or opened):
                break
            neighbours = self._keys.used(key)
            if key not in passed:
                neighbours.learn(actual, capped)
            opened = known
        return not passed

    def _score(self, said: Sequence[Said], actual: float, capped: bool, predicted: bool) -> None:
        score, standing = 0.0, None
        for each in said:
            neighbours = self._keys.get(each.key)
            if each.standing is not standing:
                standing, score = each.standing, crps(each.standing, actual, capped)
            if neighbours:
                duel = neighbours.over_predictor if predicted else neighbours.over_others
                duel.score(crps(each.own, actual, capped), score)


def keys_of(prompt: Prompt) -> tuple[bytes, ...]:
    """Its keys, coarse to fine, each a hash of all that the coarser ones are made of, and of more."""
    kind = blake2b(repr((prompt.model, bool(prompt.stop))).encode("utf-8", "backslashreplace"), digest_size=16)
    keys = [kind.digest()]
    application = kind.copy()
    if prompt.system or prompt.stop:
        application.update(repr(prompt.stop).encode("utf-8", "backslashreplace") + b"\0")
        application.update(_ends(prompt.system))
        keys.append(application.digest())
    text = prompt.text
    for characters in PREFIXES:
        if len(text) > characters:
            keys.append(_extended(application, b"%d:" % characters, text[:characters].encode("utf-8", "surrogatepass")))
    keys.append(_extended(application, b"all:", _ends(text)))
    return tuple(keys)


def _extended(start: blake2b, kind: bytes, text: bytes) -> bytes:
    extended = start.copy()
    extended.update(kind)
    extended.update(text)
    return extended.digest()


def _ends(text: str) -> bytes:
    if len(text) > 2 * _TEXT_END:
        text = f"{len(text)}:{text[:_TEXT_END]}{text[-_TEXT_END:]}"
    return text.encode("utf-8", "surrogatepass")
