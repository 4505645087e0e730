"""The table of metrics, and a server's text of them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from bins.dispatch import DispatchSolver, Objective, Observed
from bins.profile import resolve
from llmserve.live.cluster import LiveCluster
from llmserve.live.fleet import Fleet
from llmserve.live.journal import Header, Journal
from llmserve.observe.counters import Families
from llmserve.observe.energy import ModelledEnergy
from llmserve.observe.key_usage import KeyUsage
from llmserve.observe.metrics import Metrics
from llmserve.observe.table import TABLE
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import DispatchSolved, EngineReady, RequestArrived, SolveDispatch
from llmserve.settings.policies import SchedulingConfig


def text_of_everything() -> str:
    """/metrics of a server with a plan, the order boost, energy, a state, keys, connections, jobs and a webhook."""
    scheduling = SchedulingConfig(release="table", order="boost").resolved(barrier=True)
    header, profile = Header(scheduling), resolve("p4-googlenet")
    cluster = LiveCluster(header.scheduler(), Fleet([]), Journal(header), clock=lambda: 0.0)
    families = Families(TABLE)
    KeyUsage(lambda: cluster.models, families)
    for counted in ("llmserve_program_requests", "llmserve_batch_webhooks", "llmserve_engine_cache_events"):
        families.counter(counted)
    saver: Any = SimpleNamespace(last=SimpleNamespace(at_s=1.0, seconds=0.1, size=10), failures=0)
    metrics = Metrics(cluster, 8, [ModelledEnergy({"": profile})], saver=saver, families=families)
    metrics.follow_server(SimpleNamespace(connections=set(), cut=Counter(), buffered_bytes=0))
    metrics.follow_relays(SimpleNamespace(count=2, cpu_s=0.5))
    metrics.follow_jobs(SimpleNamespace(lines_waiting=0, lines_in_flight=0, lines_ended={}))
    observed = Observed(rates_per_s=(1.0,), lengths=((100.0,) * 64,), engines=1, slots=scheduling.full_batch, queues=0)
    solver = DispatchSolver(profile, scheduling.full_batch, Objective(0.0, 1.0, None), barrier=True, merges=True)
    engine = EngineReady(EngineInfo("engine", scheduling.full_batch, True))
    for event in (engine, RequestArrived(Request(0, 100.0))):
        cluster.journal.append(0.0, event, cluster.scheduler.handle(event, 0.0))
    cluster.journal.append(0.0, DispatchSolved(solver.solve(observed)), [SolveDispatch(observed)])
    return metrics.render().decode()


def test_a_server_with_every_feature_exports_the_table_in_its_order() -> None:
    types = [line.split()[2:] for line in text_of_everything().splitlines() if line.startswith("# TYPE llmserve_")]
    assert types == [[metric.full_name, metric.kind] for metric in TABLE]


def test_names_and_labels_are_those_that_prometheus_takes() -> None:
    names = [metric.full_name for metric in TABLE]
    assert len(set(names)) == len(names)
    for metric in TABLE:
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket")), metric.name
        assert (metric.kind == "histogram") == bool(metric.buckets), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
