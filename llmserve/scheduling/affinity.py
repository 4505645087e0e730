"""Which engine has served a prompt's beginning lately, so that its prefix cache is used again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

ENGINES_MAX = 4  # remembered per prefix, the latest ones


class PrefixMemory:
    """The last `prefixes_max` hashes of prompt beginnings, each with the engines that served it last.

    A request brings hashes of ever longer beginnings; the longest one that is known counts.
    """

    def __init__(self, prefixes_max: int = 16_384) -> None:
        self._prefixes_max = prefixes_max
        self._engines: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # hash -> names, the latest first

    def __len__(self) -> int:
        return len(self._engines)

    def served(self, prefixes: tuple[int, ...], engine: str) -> None:
        for prefix in prefixes:
            others = [name for name in self._engines.pop(prefix, ()) if name != engine]
            self._engines[prefix] = (engine, *others[: ENGINES_MAX - 1])
        while len(self._engines) > self._prefixes_max:
            self._engines.popitem(last=False)

    def among(self, prefixes: tuple[int, ...], engines: Collection[str]) -> list[str]:
        """Those of `engines` that served the longest beginning any of them served; [] when none did."""
        for prefix in reversed(prefixes):
            known = [name for name in self._engines.get(prefix, ()) if name in engines]
            if known:
                return known
        return []

    def forget(self, engine: str) -> None:
        """It has lost its cache."""
        for prefix, names in list(self._engines.items()):
            left = tuple(name for name in names if name != engine)
            if left:
                self._engines[prefix] = left
            else:
                del self._engines[prefix]
