"""The samples of one reading of /metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

GROWING = ("_total", "_count", "_sum", "_bucket")


class Scrape:
    """Samples by name and labels. Raises ValueError when the text is not Prometheus'."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, dict[frozenset[tuple[str, str]], float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name][frozenset(sample.labels.items())] = sample.value

    def __contains__(self, name: str) -> bool:
        return bool(self._samples.get(name))

    def since(self, before: Scrape) -> None:
        """Keep of what only grows the growth since an earlier reading of the same process."""
        for name, samples in self._samples.items():
            if name.endswith(GROWING):
                earlier = before._samples.get(name, {})
                for labels in samples:
                    samples[labels] -= earlier.get(labels, 0.0)

    def rows(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        for labels, value in self._samples.get(name, {}).items():
            yield dict(labels), value

    def by(self, name: str, label: str, **others: str) -> dict[str, float]:
        """Sums by the values of a label, of the samples that have the other labels."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.rows(name):
            if others.items() <= labels.items():
                sums[labels.get(label, "")] += value
        return dict(sums)

    def sum(self, name: str, **labels: str) -> float:
        return sum(self.by(name, "", **labels).values())
