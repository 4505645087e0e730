"""An engine's blocks of tokens, and the blocks of prompts that they hold."""

import random
import tracemalloc

from llmserve.kv_events.chains import Chains, Numbers
from llmserve.kv_events.reading import Stored
from llmserve.request import Request
from llmserve.scheduling.residency import Residency

SIZE = 4


def store(chains: Chains, tokens: list[int], first: int = 0, parent: int | None = None) -> list[int]:
    """Store the blocks of these tokens, whose hashes are first, first + 1, ..."""
    hashes = tuple(range(first, first + len(tokens) // SIZE))
    return chains.store(Stored(hashes, parent, tokens[: SIZE * len(hashes)], SIZE))


def test_blocks_of_a_prompt_are_dropped_with_the_engines_blocks_at_their_ends() -> None:
    chains, tokens = Chains(), list(range(32))
    assert store(chains, tokens, first=100) == []
    chains.tie([1, 2], 0.5, tokens)
    assert chains.remove([107, 106]) == [2]
    assert chains.remove([105, 104]) == []
    assert chains.remove([103]) == [1]


def test_a_prompt_that_is_computed_again_is_stored_again() -> None:
    chains, tokens = Chains(), list(range(16))
    store(chains, tokens)
    chains.tie([1, 2], 0.5, tokens)
    assert store(chains, tokens, first=50) == [1, 2], "another engine process may name its blocks otherwise"


def test_a_conversation_goes_on_from_the_blocks_before() -> None:
    chains, tokens = Chains(), list(range(32))
    store(chains, tokens[:16])
    chains.tie([1, 2, 3, 4], 0.25, tokens)
    assert store(chains, tokens[16:], first=20, parent=3) == [3, 4]
    assert chains.remove([23]) == [4]


def test_blocks_after_an_unknown_one_are_not_known() -> None:
    chains, tokens = Chains(), list(range(32))
    assert store(chains, tokens[16:], first=20, parent=3) == []
    assert len(chains) == 0


def test_a_prompt_that_the_engine_drops_and_computes_again_stays_tied() -> None:
    chains, tokens = Chains(), list(range(16))
    assert not chains.knows([1, 2])
    store(chains, tokens)
    chains.tie([1, 2], 0.5, tokens)
    assert chains.knows([1, 2])
    assert not chains.knows([1])
    assert chains.remove([3, 2, 1]) == [2, 1]
    assert chains.knows([1, 2])
    assert store(chains, tokens[4:], first=10, parent=0) == [1, 2]


def test_a_prompts_block_that_is_shorter_than_the_engines_is_not_tied() -> None:
    chains, tokens = Chains(), list(range(16))
    store(chains, tokens)
    chains.tie(list(range(1, 17)), 1 / 16, tokens)
    assert chains.remove([0]) == [7], "the last one that ends there"


def test_a_cleared_cache_has_nothing() -> None:
    chains, tokens = Chains(), list(range(16))
    store(chains, tokens)
    chains.tie([1, 2], 0.5, tokens)
    chains.clear()
    assert (len(chains), chains.knows([1, 2]), chains.remove([0, 1, 2, 3])) == (0, False, [])


def test_numbers_are_a_map() -> None:
    rng, numbers, plain = random.Random(1), Numbers(), dict[int, int]()
    for _ in range(20_000):
        key, value = rng.choice([rng.randrange(100), 4_096 * rng.randrange(100)]), rng.randrange(2**63)
        if rng.random() < 0.6:
            numbers.put(key, value)
            plain[key] = value
        else:
            assert numbers.pop(key) == plain.pop(key, None)
        assert numbers.get(key) == plain.get(key)
    assert len(numbers) == len(plain)


def test_a_million_blocks_of_16_tokens_take_less_than_64_mib() -> None:
    """With the index of the scheduler, and every prompt tied: a tenth of that is measured."""
    rng = random.Random(1)
    tracemalloc.start()
    chains, index = Chains(), Residency()
    for _ in range(100):
        tokens, hashes = [rng.randrange(50_000)] * 16_000, tuple([rng.getrandbits(63) for _ in range(1_000)])
        chains.store(Stored(hashes, None, tokens, 16))
        blocks = tuple([rng.getrandbits(48) for _ in range(125)])
        chains.tie(blocks, 1 / 125, tokens)
        index.sent("a", Request(0, blocks=blocks, block_tokens=128.0))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(chains) == 100_000
    assert len(index) == 12_500
    assert taken < 0.1 * (64 << 20)
