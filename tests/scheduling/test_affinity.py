"""Which engine recently served a prompt's prefix."""

from llmserve.scheduling.engines import PREFIX_ENGINES_MAX, PrefixMemory


def test_the_longest_known_prefix_counts() -> None:
    memory = PrefixMemory()
    memory.served((1, 2), "a")
    memory.served((1, 2, 3), "b")
    assert memory.among((1, 2, 3), {"a", "b"}) == ["b"]
    assert memory.among((1, 2, 9), {"a", "b"}) == ["b", "a"]
    assert memory.among((1, 2, 3), {"a"}) == ["a"]
    assert memory.among((7,), {"a", "b"}) == []
    assert memory.among((), {"a", "b"}) == []


def test_affinity_remembers_a_bounded_number_of_prefixes_and_engines() -> None:
    memory = PrefixMemory(prefixes_max=100)
    for number in range(10_000):
        memory.served((number,), "a")
    assert len(memory) == 100
    for number in range(50):
        memory.served((9_999,), f"e{number}")
    assert len(memory.among((9_999,), {f"e{number}" for number in range(50)})) == PREFIX_ENGINES_MAX


def test_an_engine_that_has_lost_its_cache_is_forgotten() -> None:
    memory = PrefixMemory()
    memory.served((1,), "a")
    memory.served((1, 2), "b")
    memory.forget("b")
    assert memory.among((1, 2), {"a", "b"}) == ["a"]
    assert len(memory) == 1
