"""The laboratory's fleet at small size: 2 gateways, 3 groups, nodes that die."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from questions.fleet.group import EngineSpeed
from questions.fleet.layout import Death, Deaths, drawn_deaths, places
from questions.fleet.rounds import Fleet, Results, Settings
from questions.fleet.traffic import Burst, Sent, Traffic

from llmserve.request import Request

SPEED = EngineSpeed(slots=2, step_s=0.02, prefill_s=0.1)
RESTART_S = 5.0


def settings(*deaths: Death, load: float = 0.7, pools: int = 1, span_s: float = 40.0, seed: int = 0) -> Settings:
    """3 groups of 16 GPUs, each on two nodes, of one pool."""
    peak = load * SPEED.requests_per_s(50.0) * 48 / pools
    traffic = Traffic((peak,) * pools, (0.7, 0.3), span_s, gateways=2, tokens_mean=50.0, slo_s=60.0, seed=seed)
    return Settings(tuple(places(48, 3, pools)), Deaths(deaths, RESTART_S), traffic, SPEED, models=2)


def simulated(of: Settings) -> Results:
    results = Fleet(of).run()
    assert Counter(results.ids) == Counter(range(results.sent)), "each request ends once"
    assert results.sent > 500
    return results


def test_every_request_ends_once_and_in_time_where_nothing_dies() -> None:
    results = simulated(settings())
    assert set(results.outcomes) == {"completed"}
    assert set(results.groups) == {1}


def test_the_death_of_a_node_loses_nothing_that_had_not_begun() -> None:
    """Nodes 0, 2 and 4 have the schedulers; node 1 has only engines of the first group."""
    results = simulated(settings(Death(range(1, 2), (20.0, 30.0))))
    lost = [k for k, outcome in enumerate(results.outcomes) if outcome != "completed"]
    assert {results.outcomes[k] for k in lost} == {"lost"}
    assert 0 < len(lost) <= 8 * SPEED.slots
    assert {results.ended_s[k] for k in lost} == {20.0}, "only answers that had begun are lost, at once"


def test_requests_of_a_lost_group_go_to_another() -> None:
    results = simulated(settings(Death(range(2, 3), (20.0, 30.0)), load=0.9))
    assert set(results.outcomes) <= {"completed", "lost"}
    moved = [k for k, groups in enumerate(results.groups) if groups > 1]
    assert moved
    assert {results.outcomes[k] for k in moved} == {"completed"}
    assert sum(outcome == "lost" for outcome in results.outcomes) <= 16 * SPEED.slots


def test_requests_wait_at_their_gateways_while_no_group_of_their_pool_is_up() -> None:
    results = simulated(settings(Death(range(6), (20.0, 21.0))))
    waited = np.array(results.waited_s)[(np.array(results.arrived_s) > 20.0) & (np.array(results.arrived_s) < 21.0)]
    assert waited.min() > RESTART_S - 1.0
    assert set(results.outcomes) == {"completed", "lost"}


@pytest.mark.parametrize("processes", [1, 2])
def test_the_same_seed_gives_the_same_fleet_in_any_number_of_processes(processes: int) -> None:
    deaths = drawn_deaths(48, 40.0, nodes=2, racks=0, down_s=10.0, restart_s=RESTART_S, rng=np.random.default_rng(1))
    one = simulated(replace(settings(), deaths=deaths))
    other = simulated(replace(settings(), deaths=deaths, processes=processes))
    assert (one.ids, one.ended_s, one.outcomes, one.behind) == (other.ids, other.ended_s, other.outcomes, other.behind)
    assert simulated(replace(settings(seed=1), deaths=deaths)).ended_s != one.ended_s


def test_a_group_is_told_what_the_other_groups_of_its_pool_served() -> None:
    assert simulated(settings()).behind
    assert not simulated(settings(pools=3)).behind, "a group alone in its pool has nobody to hear of"
    assert not simulated(replace(settings(), exchange=False)).behind


def test_a_burst_makes_other_keys_wait_little() -> None:
    one_model = replace(settings(load=0.8).traffic, shares=(1.0,), curve=lambda part: 1.0)
    traffic = replace(one_model, bursts=(Burst(0, 0, key=49, begin_s=10.0),))
    results = simulated(replace(settings(), traffic=traffic, models=1))
    waited, burst = np.array(results.waited_s), np.array(results.bursts)
    during = (np.array(results.arrived_s) > 20.0) & (np.array(results.arrived_s) < 30.0)
    assert np.median(waited[during & burst]) > 5 * np.median(waited[during & ~burst])


def test_traffic_of_a_second_follows_the_seed_and_the_day() -> None:
    traffic = settings().traffic
    assert traffic.second(3, 0) == traffic.second(3, 0)
    assert traffic.second(3, 0) != replace(traffic, seed=1).second(3, 0)
    assert len(traffic.second(20, 0)) > 2 * len(traffic.second(0, 0))
    assert isinstance(traffic.second(20, 7)[0], Sent)
    assert [sent.request.id for sent in traffic.second(20, 7)] == list(range(7, 7 + len(traffic.second(20, 7))))
    assert all(isinstance(sent.request, Request) and 20.0 <= sent.at_s < 21.0 for sent in traffic.second(20, 7))
