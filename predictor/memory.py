"""Forecasts for the requests of a template or application, from its own recent lengths.

A request has a chain of keys, coarse to fine: its model; its application (system prompt, stop strings, and what else
shapes the answer, such as how much the model is to think); the first 32 characters, the first 128, and the whole of its
text. Each key remembers its last lengths, the scores of its own forecasts, and the scores of the standing forecasts,
which are those without this key. From coarse to fine, a key with a clearly better score takes over. So a key overrules
a predictor only where the predictor was worse.

An answer teaches the key whose forecast stands, and the finer keys. The coarser keys, and the predictor's correction,
learn only one answer in OVERRULED_LEARNT. If they learnt all answers, they would forecast the lengths of templates that
finer keys serve; if they learnt none, they would stay wrong after a finer key has taken over.

The memory holds only hashes and lengths, never a text. Hashes with a secret cannot be compared with those of guessed
texts by somebody who does not know the secret.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from statistics import NormalDist
from typing import Generic, TypeVar

import msgspec
import numpy as np

from bins.calibration import midpoints
from predictor.prompt import Prompt
from predictor.quantiles import LEVELS, MIDDLE, Logs, ascending, crps, sample_quantiles
from predictor.state import Saving, State, array, part

PREFIXES = (32, 128)
"""Numbers of first characters that define a template."""
SCORED_MIN = 4
"""Lengths of a key before its forecasts are scored; also scores of a key before it overrules a predictor."""
TRUSTED_MIN = 8
"""Lengths of a key before the key may take over."""
MARGIN = 0.9
"""A key takes over when its score is below this share of the standing forecast's; a smaller gain may be chance."""
LEAD = 0.97
"""The text learner, which knows the prediction, stands when its score is below this share of the predictor's."""
BORROWED = 2.0
"""Weight of the standing forecast's spread, in lengths of the key."""

OVERRULED_LEARNT = 8

KEY_BYTES = 16
LENGTHS_A_SLICE = 2048  # that are saved at once, in about 0.3 ms
_TEXT_END = 4096  # a longer text is hashed by its two ends and its length, to bound the time per request
_LEVELS = midpoints(LEVELS)
_NOTHING_KNOWN: Logs = tuple(NormalDist().inv_cdf(float(p)) for p in _LEVELS)  # a spread of e, for a first length

K = TypeVar("K")
V = TypeVar("V")


class RecentlyUsed(Generic[K, V]):
    """A dictionary of at most `size` entries that drops the least recently used entry. size : 0 keeps nothing."""

    def __init__(self, size: int, make: Callable[[], V]) -> None:
        assert size >= 0
        self._size, self._make = size, make
        # The least recently used is first. The keys of a dict are listed in a fifth of the time of an OrderedDict's.
        self._entries: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """The entry, if there is one. A `get` is not a use: requests that never end must not displace learnt keys."""
        return self._entries.get(key)

    def entries(self) -> Iterator[tuple[K, V]]:
        """All entries, the least recently used first. Entries that come or go meanwhile may be left out."""
        for key in list(self._entries):
            entry = self._entries.get(key)
            if entry is not None:
                yield key, entry

    def fill(self, entries: Iterable[tuple[K, V]]) -> None:
        """Replace all entries. entries : as from `entries`; the first ones are left out where there are too many."""
        self._entries = {}
        for key, entry in entries:
            self._put(key, entry)

    def used(self, key: K) -> V:
        """The entry, made if there is none, and marked as the most recently used."""
        entry = self._entries.pop(key, None)
        if entry is None:
            entry = self._make()
        self._put(key, entry)
        return entry

    def _put(self, key: K, entry: V) -> None:
        self._entries[key] = entry
        if len(self._entries) > self._size:
            del self._entries[next(iter(self._entries))]


@dataclass(slots=True)
class Duel:
    """Scores of a key's own forecasts and of the standing forecasts, on the same answers.

    Means over about the last `window` scores; later scores weigh more, so that the means follow a change.
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

    def numbers(self) -> tuple[float, ...]:
        return self.own, self.standing, self.count

    def take(self, numbers: Sequence[float]) -> None:
        """numbers : as from `numbers`."""
        self.own, self.standing, self.count = numbers[0], numbers[1], int(numbers[2])


class Neighbours:
    """The recent lengths of the requests of one key, and the scores of its forecasts.

    size : number of lengths.  least : number of lengths for the first forecast.
    """

    __slots__ = (
        *("_alone", "_at", "_cap", "_capped", "_least", "_logs", "_quantiles", "_size", "_unused", "count"),
        *("over_others", "over_predictor"),
    )

    def __init__(self, size: int, least: int) -> None:
        self._size, self._least = size, least
        self._logs: list[float] = []  # most keys have one length, so an array of `size` would be mostly empty
        self._capped: list[bool] = []
        self._quantiles: list[float] = []
        self._alone: Logs | None = None  # the forecast without a standing forecast, until it changes
        self._cap = 0.0  # quantiles that are nan are above this cap
        self._unused = 0  # lengths since the quantiles were computed
        self._at = 0
        self.count = 0
        self.over_others = Duel(max(1, size // 2))  # against coarser keys without a predictor
        self.over_predictor = Duel(max(1, size // 2))  # against a predictor, maybe overruled by coarser keys

    def learn(self, actual: float, capped: bool) -> None:
        if self.count < self._size:
            self._logs.append(actual)
            self._capped.append(capped)
            self.count += 1
            self._alone = None
        else:
            self._logs[self._at], self._capped[self._at] = actual, capped
        self._at = (self._at + 1) % self._size
        self._unused += 1
        if self.count >= self._least and self._unused > min(15, self.count // 8):
            logs, flags = np.array(self._logs), np.array(self._capped)
            self._quantiles = sample_quantiles(logs, flags, _LEVELS).tolist()
            self._cap = float(np.max(logs, where=flags, initial=0.0))
            self._unused, self._alone = 0, None

    def forecast(self, standing: Logs | None) -> Logs | None:
        """The key's own forecast: its quantiles with a little of the standing forecast's spread; None: too few lengths.

        A few equal lengths are no certainty: the standing forecast, moved to the key's own median, has the weight
        BORROWED / (n + BORROWED) for n lengths. Quantiles above all uncapped answers come from the standing forecast,
        but are never below the caps.
        """
        if not self._quantiles:
            return None
        if standing is None:
            self._alone = self._alone or self._forecast(None)
            return self._alone
        return self._forecast(standing)

    def _forecast(self, standing: Logs | None) -> Logs:
        own, other = self._quantiles, standing or _NOTHING_KNOWN
        if own[-1] != own[-1]:  # nan
            own = self._completed(standing)
        weight = self.count / (self.count + BORROWED)
        borrowed = 1 - weight
        shift = borrowed * (own[MIDDLE] - other[MIDDLE])
        return ascending([weight * a + borrowed * b + shift for a, b in zip(own, other, strict=True)])

    def _completed(self, standing: Logs | None) -> list[float]:
        """The quantiles, with nan replaced by the standing forecast or the cap."""
        cap, middle = self._cap, self._quantiles[MIDDLE]
        other = standing or tuple([cap + log for log in _NOTHING_KNOWN])
        shift = 0.0 if middle != middle else middle - other[MIDDLE]
        return [max(b + shift, cap) if a != a else a for a, b in zip(self._quantiles, other, strict=True)]

    def takes_over(self, predicted: bool) -> bool:
        """Whether the key is better than the standing forecast. Without enough scores the finer key is taken for
        better than coarser keys, but not than a predictor.
        """
        duel = self.over_predictor if predicted else self.over_others
        if self.count < TRUSTED_MIN or duel.count < SCORED_MIN:
            return self.count >= TRUSTED_MIN and not predicted
        return duel.own < MARGIN * duel.standing

    def write(self, columns: State, row: int) -> None:
        """Write everything into a row of the arrays of `_columns`."""
        columns["logs"][row, : self.count] = self._logs
        columns["capped"][row, : self.count] = self._capped
        columns["numbers"][row] = (
            *(self._at, self.count, self._unused, self._cap, len(self._quantiles)),
            *self.over_others.numbers(),
            *self.over_predictor.numbers(),
        )
        if self._quantiles:
            columns["quantiles"][row] = self._quantiles

    def read(self, columns: State, row: int) -> None:
        """Take back what `write` wrote."""
        numbers: list[float] = columns["numbers"][row].tolist()
        self._at, self.count, self._unused = map(int, numbers[:3])
        if not (0 <= self._at < self._size and 0 <= self.count <= self._size):
            raise ValueError("the state of a key names lengths that it does not hold")
        self._logs = columns["logs"][row, : self.count].tolist()
        self._capped = columns["capped"][row, : self.count].tolist()
        self._cap, self._alone = numbers[3], None
        self._quantiles = columns["quantiles"][row].tolist() if numbers[4] else []
        self.over_others.take(numbers[5:8])
        self.over_predictor.take(numbers[8:])


def _columns(keys: int, size: int) -> State:
    """Arrays for the states of `keys` Neighbours of `size` lengths, one row each."""
    return {
        "key": np.zeros((keys, KEY_BYTES), dtype=np.uint8),
        "logs": np.zeros((keys, size)),
        "capped": np.zeros((keys, size), dtype=bool),
        "numbers": np.zeros((keys, 11)),
        "quantiles": np.zeros((keys, LEVELS)),
    }


def _saving(entries: Iterator[tuple[bytes, Neighbours]], size: int) -> Generator[None, None, list[State]]:
    """Make the states of all keys, some in each slice."""
    states = []
    at_once = max(1, LENGTHS_A_SLICE // size)
    while members := list(islice(entries, at_once)):
        columns = _columns(len(members), size)
        for row, (key, neighbours) in enumerate(members):
            columns["key"][row] = np.frombuffer(key, np.uint8)
            neighbours.write(columns, row)
        states.append(columns)
        yield
    return states


def _restored(states: list[State], size: int, least: int) -> list[tuple[bytes, Neighbours]]:
    """The entries of the states. Raises ValueError when they were of another size."""
    entries = []
    for columns in states:
        keys = array(columns, "key", (None, KEY_BYTES), "u")
        for name, own in _columns(0, size).items():
            array(columns, name, (len(keys), *own.shape[1:]), own.dtype.kind)
        for row, key in enumerate(keys):
            neighbours = Neighbours(size, least)
            neighbours.read(columns, row)
            entries.append((key.tobytes(), neighbours))
    return entries


class KeyForecast(msgspec.Struct, frozen=True):
    """A key's own forecast, and the standing forecast without this key."""

    key: bytes
    own: Logs
    standing: Logs


class Verdict(msgspec.Struct, frozen=True):
    """The final forecast, its source, and the forecast of each key; () and "" when nothing is known.

    overruled : keys coarser than the application or template whose forecast stands; () for other sources.
    """

    logs: Logs
    source: str
    by_key: tuple[KeyForecast, ...]
    overruled: tuple[bytes, ...] = ()


class Memory:
    """The keys of all models. keys_max : remembered applications and templates.  models_max : remembered models."""

    def __init__(self, keys_max: int, lengths_per_key: int, window: int, models_max: int) -> None:
        self._sizes = lengths_per_key, window
        self._keys = RecentlyUsed[bytes, Neighbours](keys_max, lambda: Neighbours(lengths_per_key, SCORED_MIN))
        self._recent = RecentlyUsed[bytes, Neighbours](models_max, lambda: Neighbours(window, 1))
        self._all = Duel(window)  # the text learner's, against a predictor
        self._overruled = 0

    def __len__(self) -> int:
        return len(self._keys)

    def judge(self, chain: tuple[bytes, ...], predicted: Logs | None, learnt: Logs | None = None) -> Verdict:
        """The best forecast. chain : from `keys_of`.  predicted : a predictor's quantiles, if any.

        learnt : quantiles by the text learner, if any. The model's key keeps their scores against a predictor.
        Without one they stand: the learner gives no weight to words that tell nothing, so recent lengths are no better.
        """
        standing, source = predicted, "predictor" if predicted else ""
        by_key: list[KeyForecast] = []
        place = 0
        if learnt and standing:
            by_key.append(KeyForecast(chain[0], learnt, standing))
        if learnt and (not standing or self._leads(self._recent.get(chain[0]))):
            standing, source = learnt, "learner"
        recent = self._recent.get(chain[0]) if not standing else None
        if recent and (own := recent.forecast(None)):
            standing, source = own, "recent"
        for finer, key in enumerate(chain[1:], 1):
            neighbours = self._keys.get(key)
            own = neighbours.forecast(standing) if neighbours and standing else None
            if neighbours and standing and own:
                by_key.append(KeyForecast(key, own, standing))
                if neighbours.takes_over(predicted is not None):
                    standing, source, place = own, "memory", finer
        return Verdict(standing or (), source, tuple(by_key), chain[:place])

    def _leads(self, model: Neighbours | None) -> bool:
        """Whether the text learner is to stand in a predictor's place for a model; while the model has few scores, by
        those of all models.
        """
        duel = model.over_predictor if model and model.over_predictor.count >= TRUSTED_MIN else self._all
        return duel.count >= TRUSTED_MIN and duel.own < LEAD * duel.standing

    def learn(
        self,
        chain: tuple[bytes, ...],
        verdict: Verdict,
        actual: float,
        capped: bool,
        predicted: bool,
        counts: bool = True,
    ) -> bool:
        """Score the forecasts that were made before the length was known, then remember the length.

        counts : False for an answer that may be nonsense: its model learns only one in OVERRULED_LEARNT of them, and no
        score. Returns whether the coarsest key learnt the length; a predictor's correction should then learn it
        too.
        """
        overruled = verdict.overruled or (() if counts else chain[:1])
        self._overruled += bool(overruled)
        skipped = overruled if self._overruled % OVERRULED_LEARNT else ()
        unscored = (chain[0], *skipped) if overruled else ()  # the text learner is judged by answers that are its own
        scored = [forecast for forecast in verdict.by_key if forecast.key not in unscored]
        self._score(scored, actual, capped, predicted)
        recent = self._recent.used(chain[0])
        if not skipped:
            recent.learn(actual, capped)
        coarser_exists = True
        for key in chain[1:]:
            # A new key needs an existing coarser key: a prompt that never comes again then adds only one key.
            exists = self._keys.get(key) is not None
            if not (exists or coarser_exists):
                break
            neighbours = self._keys.used(key)
            if key not in skipped:
                neighbours.learn(actual, capped)
            coarser_exists = exists
        return not skipped

    def saving(self) -> Saving:
        """Make the state of all keys in slices. A key that learns meanwhile is saved as before or as after."""
        size, window = self._sizes
        keys = yield from _saving(self._keys.entries(), size)
        recent = yield from _saving(self._recent.entries(), window)
        duels = np.array([Duel(1).numbers(), self._all.numbers()])  # the first: of a server of before
        return {"keys": keys, "recent": recent, "duels": duels, "overruled": self._overruled}

    def restore(self, state: State) -> None:
        size, window = self._sizes
        self._keys.fill(_restored(part(state, "keys"), size, SCORED_MIN))
        self._recent.fill(_restored(part(state, "recent"), window, 1))
        self._all.take(array(state, "duels", (2, 3))[1].tolist())
        self._overruled = int(part(state, "overruled"))

    def _score(self, forecasts: Sequence[KeyForecast], actual: float, capped: bool, predicted: bool) -> None:
        score, standing = 0.0, None
        for forecast in forecasts:
            if forecast.standing is not standing:
                standing, score = forecast.standing, crps(forecast.standing, actual, capped)
            own = crps(forecast.own, actual, capped)
            if neighbours := self._keys.get(forecast.key):
                duel = neighbours.over_predictor if predicted else neighbours.over_others
                duel.score(own, score)
            elif model := self._recent.get(forecast.key):
                model.over_predictor.score(own, score)
                self._all.score(own, score)


def keys_of(prompt: Prompt, secret: bytes = b"", shared: bool = True) -> tuple[bytes, ...]:
    """The prompt's keys, coarse to fine: each hashes the content of the coarser keys and more.

    secret : at most 64 bytes, the key of the hashes.
    shared : False for applications and templates that the sender does not share with others.
    """
    kind = _kind(prompt.model, bool(prompt.stop), secret)
    keys = [kind.digest()]
    application = kind.copy()
    if not shared:
        application.update(b"sender " + prompt.sender.encode("utf-8", "backslashreplace") + b"\0")
    if prompt.system or prompt.stop or prompt.shaping:
        told = f"{prompt.stop!r}{prompt.shaping!r}" if prompt.shaping else repr(prompt.stop)
        application.update(told.encode("utf-8", "backslashreplace") + b"\0")
        application.update(_ends(prompt.system))
        keys.append(application.digest())
    text = prompt.text
    for characters in PREFIXES:
        if len(text) > characters:
            start = f"{characters}:{text[:characters]}"
            keys.append(_extended(application, start.encode("utf-8", "surrogatepass")))
    keys.append(_extended(application, b"all:" + _ends(text)))
    return tuple(keys)


@lru_cache(maxsize=128)
def _kind(model: str, stops: bool, secret: bytes) -> blake2b:
    """The hash of a model's key, to be copied."""
    return blake2b(repr((model, stops)).encode("utf-8", "backslashreplace"), digest_size=KEY_BYTES, key=secret)


def _extended(start: blake2b, text: bytes) -> bytes:
    extended = start.copy()
    extended.update(text)
    return extended.digest()


def _ends(text: str) -> bytes:
    if len(text) > 2 * _TEXT_END:
        text = f"{len(text)}:{text[:_TEXT_END]}{text[-_TEXT_END:]}"
    return text.encode("utf-8", "surrogatepass")
