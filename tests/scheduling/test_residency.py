"""Which prompts each engine has in its prefix cache."""

import random
import tracemalloc

import pytest

from llmserve.request import EngineInfo, Request
from llmserve.scheduling import residency
from llmserve.scheduling.messages import BLOCKS_MAX, CacheChanged, EngineLost, EngineReady, RequestArrived, StartBatch
from llmserve.scheduling.residency import Residency
from llmserve.settings.policies import SchedulingConfig


def asks(*blocks: int, tokens: float = 100.0) -> Request:
    return Request(0, prompt_tokens=tokens * len(blocks), blocks=blocks, block_tokens=tokens)


def test_an_engine_has_the_prompts_that_were_sent_to_it() -> None:
    caches = Residency()
    caches.sent("a", asks(1, 2, 3))
    caches.sent("b", asks(1))
    assert [caches.hit_tokens("a", asks(*blocks)) for blocks in ((1, 2, 3), (1, 2, 9), (7, 8), ())] == [300, 200, 0, 0]
    assert [caches.hit_tokens(name, asks(1, 2, 3, 4)) for name in ("a", "b", "c")] == [300, 100, 0]


def test_a_full_cache_drops_what_was_used_longest_ago_and_its_end_first() -> None:
    caches = Residency()
    caches.limit("a", 500)
    caches.sent("a", asks(1, 2, 3))
    caches.sent("a", asks(1, 20))
    assert caches.hit_tokens("a", asks(1, 2, 3)) == 300, "four blocks fit"
    caches.sent("a", asks(5, 6))
    assert caches.hit_tokens("a", asks(1, 2, 3)) == 200, "the end of the first prompt is gone"
    caches.sent("a", asks(7))
    assert caches.hit_tokens("a", asks(1, 2, 3)) == 100, "what both prompts had is used last"
    assert caches.hit_tokens("a", asks(1, 20)) == 200


def test_a_prompt_larger_than_the_cache_leaves_its_beginning_there() -> None:
    caches = Residency()
    caches.limit("a", 250)
    caches.sent("a", asks(1, 2, 3, 4))
    assert caches.hit_tokens("a", asks(1, 2, 3, 4)) == 200


def test_what_an_engine_tells_counts() -> None:
    caches = Residency()
    caches.sent("a", asks(1, 2, 3))
    caches.changed("a", (7, 8), (2, 3), cleared=False)
    assert [caches.hit_tokens("a", asks(*blocks)) for blocks in ((1, 2, 3), (7, 8))] == [100, 200]
    caches.changed("a", (5,), (), cleared=True)
    assert [caches.hit_tokens("a", asks(*blocks)) for blocks in ((1, 2, 3), (5,))] == [0, 100]


def test_a_restarted_engine_has_nothing() -> None:
    caches = Residency()
    caches.sent("a", asks(1, 2))
    caches.sent("b", asks(1, 2))
    caches.forget("a")
    assert [caches.hit_tokens(name, asks(1, 2)) for name in ("a", "b")] == [0, 200]


def test_a_cache_that_keeps_less_than_expected_is_taken_for_a_smaller_one() -> None:
    """Of 20 prompts in turn, each of 1,000 tokens, a cache of some 12,000 tokens has none when it comes again."""
    caches = Residency()
    prompts = [tuple(range(first, first + 10)) for first in range(0, 200, 10)]
    expected = []
    for _ in range(4):
        hits = 0.0
        for prompt in prompts:
            hits += (hit := caches.hit_tokens("a", asks(*prompt)))
            caches.ended("a", hit, 0.0)
            caches.sent("a", asks(*prompt))
        expected.append(hits)
    assert expected == [0, 16_000, 0, 0], "the first 16 hits that were expected in vain were enough"


def test_a_cache_that_keeps_more_than_expected_is_taken_for_a_larger_one() -> None:
    caches = Residency()
    prompts = [tuple(range(first, first + 10)) for first in range(0, 200, 10)]
    for prompt in prompts * 3:
        caches.ended("a", caches.hit_tokens("a", asks(*prompt)), 0.0)
        caches.sent("a", asks(*prompt))
    assert caches.hit_tokens("a", asks(*prompts[0])) == 0
    for prompt in prompts * 10:
        caches.ended("a", caches.hit_tokens("a", asks(*prompt)), 1_000.0)
        caches.sent("a", asks(*prompt))
    assert caches.hit_tokens("a", asks(*prompts[0])) == 1_000


def test_a_few_prompts_that_started_together_do_not_make_a_cache_smaller() -> None:
    caches = Residency()
    for number in range(200):
        request = asks(*range(10 * (number // 4), 10 * (number // 4) + 10))
        together = number % 4 == 1  # as the one before it is still computed
        caches.ended("a", caches.hit_tokens("a", request), 0.0 if together or number % 4 == 0 else 1_000.0)
        caches.sent("a", request)
    assert caches._cache("a").learnt_max == float("inf")


def test_an_engine_that_keeps_no_prompts_has_none() -> None:
    scheduler = SchedulingConfig(order="fffs", batch_size=1).resolved(barrier=False).scheduler()
    scheduler.handle(EngineReady(EngineInfo("a", 8, False, tokens_max=10_000, prefix_cache=False)), 0.0)
    scheduler.handle(RequestArrived(asks(1, 2)), 1.0)
    assert scheduler.group.pool.residency.hit_tokens("a", asks(1, 2)) == 0


def test_the_search_by_halves_finds_what_a_search_from_the_beginning_finds() -> None:
    rng, caches = random.Random(1), Residency()
    caches.limit("a", 4_000)
    chains = [tuple(range(first, first + 40)) for first in range(0, 4_000, 40)]
    for _ in range(300):
        chain = rng.choice(chains)
        caches.sent("a", asks(*chain[: rng.randint(1, 40)]))
        tried = rng.choice(chains)
        cached = caches._cache("a").blocks
        leading = next((place for place, block in enumerate(tried) if block not in cached), 40)
        assert caches.hit_tokens("a", asks(*tried)) == 100 * leading


def test_what_any_engine_has_is_found_in_one_search_whatever_comes_and_goes() -> None:
    rng, caches = random.Random(2), Residency()
    names, chains = ("a", "b", "c"), [tuple(range(first, first + 20)) for first in range(0, 400, 20)]
    for step in range(600):
        name, chain, length = rng.choice(names[: 1 + step // 200]), rng.choice(chains), rng.randint(1, 20)
        caches.limit(name, 3_000)
        before = caches.hit_tokens(name, asks(*chain[:length]))
        match step % 8:
            case 0:
                caches.changed(name, (), chain[length - 1 :], cleared=False)
            case 1:
                caches.forget(name)
            case _:
                assert caches.sent(name, asks(*chain[:length])) == before
        tried = asks(*rng.choice(chains))
        assert caches.most_tokens(tried) == max(caches.hit_tokens(name, tried) for name in names)


def test_many_engines_and_prompts_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "BLOCKS_MIN", 10)
    caches = Residency(blocks_max=1_000)
    for number in range(10_000):
        caches.sent(f"e{number % 5}", asks(number))
    assert len(caches) == 1_000
    tracemalloc.start()
    caches = Residency(blocks_max=10_000)
    for number in range(0, 30_000, 100):
        caches.sent("ab"[number % 200 // 100], asks(*range(2**40 + number, 2**40 + number + 100)))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(caches) == 10_000
    assert taken / 10_000 * residency.BLOCKS_MAX < 32 << 20


# ---- in the scheduler ----


def test_the_scheduler_follows_what_an_engine_tells() -> None:
    scheduler = SchedulingConfig(order="fffs", batch_size=1).resolved(barrier=False).scheduler()
    for name in ("a", "b"):
        scheduler.handle(EngineReady(EngineInfo(name, 8, False)), 0.0)
    scheduler.handle(CacheChanged("nowhere", (1, 2)), 0.0)
    assert scheduler.handle(CacheChanged("b", (1, 2)), 0.0) == []
    [start] = scheduler.handle(RequestArrived(asks(1, 2)), 1.0)
    assert isinstance(start, StartBatch)
    assert start.engine == "b"
    scheduler.handle(EngineLost("b"), 2.0)
    assert scheduler.group.pool.residency.hit_tokens("b", asks(1, 2)) == 0


def test_one_event_tells_of_a_bounded_number_of_blocks() -> None:
    with pytest.raises(ValueError, match="too many for one step"):
        CacheChanged("a", (1,), tuple(range(BLOCKS_MAX)))
