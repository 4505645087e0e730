"""Counters and histograms of our own, against those of prometheus_client."""

import random

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from llmserve.observe.counters import Families

BOUNDS = (0.005, 0.5, 1.0, 30.0)
NAMES = ("plain", 'a "quoted" one', "back\\slash", "line\nfeed", "höher", "")


def test_the_text_is_that_of_prometheus_client_for_the_same_counts() -> None:
    rng, ours, registry = random.Random(1), Families(), CollectorRegistry()
    requests = ours.counters("requests", "Requests that ended", ["stream", "outcome"])
    seconds = ours.histograms("seconds", "How long", BOUNDS, ["model"])
    bare, sizes = ours.counters("bare", "Alone").of(), ours.histograms("sizes", "Sizes", BOUNDS).of()
    ours.counters("unused", "Without a member", ["model"])
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
        Families().counters("requests", "Requests", ["stream"]).of("a", "b")
