"""Counters and histograms of our own, against those of prometheus_client."""

import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from llmserve.observe.counters import Families, Metric, lines_of

BOUNDS = (0.005, 0.5, 1.0, 30.0)
TABLE = (
    Metric("requests", "counter", "Requests that ended", ("stream", "outcome")),
    Metric("seconds", "histogram", "How long", ("model",), BOUNDS),
    Metric("bare", "counter", "Alone"),
    Metric("sizes", "histogram", "Sizes", (), BOUNDS),
    Metric("unused", "counter", "Without a member", ("model",)),
    Metric("elsewhere", "counter", "Counted by nobody here"),
    Metric("level", "gauge", "Read at a scrape", ("part",), by_model=True),
)
NAMES = ("plain", 'a "quoted" one', "back\\slash", "line\nfeed", "höher", "")


def test_the_text_is_that_of_prometheus_client_for_the_same_counts() -> None:
    rng, ours, registry = random.Random(1), Families(TABLE), CollectorRegistry()
    sizes, bare = ours.histogram("sizes").of(), ours.counter("bare").of()
    requests, seconds = ours.counter("requests"), ours.histogram("seconds")
    ours.counter("unused")
    theirs = prometheus_client.Counter("requests", "Requests that ended", ["stream", "outcome"], registry=registry)
    their_seconds = prometheus_client.Histogram("seconds", "How long", ["model"], buckets=BOUNDS, registry=registry)
    their_bare = prometheus_client.Counter("bare", "Alone", registry=registry)
    their_sizes = prometheus_client.Histogram("sizes", "Sizes", buckets=BOUNDS, registry=registry)
    prometheus_client.Counter("unused", "Without a member", ["model"], registry=registry)
    for _ in range(500):
        name, value = rng.choice(NAMES), rng.choice([*BOUNDS, 0.0, 1e9, rng.expovariate(1.0)])
        requests.of(name, "ok").inc()
        theirs.labels(name, "ok").inc()
        seconds.of(name).observe(value)
        their_seconds.labels(name).observe(value)
        sizes.observe(value)
        their_sizes.observe(value)
        bare.inc(value)
        their_bare.inc(value)
    requests.remove("plain", "ok")
    theirs.remove("plain", "ok")
    requests.remove("never", "counted")
    expected = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert ours.text().splitlines() == expected


def test_a_metric_has_a_value_for_each_of_its_labels() -> None:
    with pytest.raises(ValueError, match="argument"):
        Families(TABLE).counter("requests").of("a", "b", "c")


def test_only_metrics_of_the_table_are_counted_and_by_their_kind() -> None:
    with pytest.raises(KeyError):
        Families(TABLE).counter("requsets")
    with pytest.raises(AssertionError, match="is a histogram"):
        Families(TABLE).counter("seconds")


def test_what_is_read_has_the_text_of_prometheus_client_and_the_label_model_if_there_are_several() -> None:
    registry, level = CollectorRegistry(), TABLE[-1]
    theirs = prometheus_client.Gauge("level", "Read at a scrape", ["model", "part"], registry=registry)
    rows = [(("m", NAMES[1]), 0.25), (("m", "x"), 3), (("n", "x"), True)]
    for (model, part), number in rows:
        theirs.labels(model, part).set(number)
    assert "".join(lines_of(level, rows, level.help)) == generate_latest(registry).decode()
    assert list(lines_of(level, rows[1:2], level.help))[2:] == ['level{part="x"} 3.0\n']
    assert list(lines_of(level, rows[1:2], level.help, several_models=True))[2:] == ['level{model="m",part="x"} 3.0\n']
