"""What vLLM and SGLang say of their prefix caches."""

import msgspec
import pytest

from llmserve.kv_events.reading import Cleared, Removed, Stored, read_events


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([1764285000.25, list(events), 0])


def stored(**changed: object) -> dict[str, object]:
    """As vLLM 0.32.0 writes one."""
    told = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return {**told, **changed}


def test_blocks_that_were_stored_dropped_and_cleared_are_read_in_their_order() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [12], "medium": "GPU", "group_idx": 0}
    events = read_events(batch(stored(), removed, {"type": "AllBlocksCleared"}))
    assert events == [Stored((11, 12), None, [1, 2, 3, 4], 2), Removed((12,)), Cleared()]


def test_events_as_arrays_say_the_same() -> None:
    """As vLLM before maps, and SGLang, write them."""
    old = batch(["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, None], ["BlockRemoved", [12]], ["AllBlocksCleared"])
    assert read_events(old) == [Stored((11, 12), 10, [1, 2, 3, 4], 2), Removed((12,)), Cleared()]


def test_a_hash_is_a_number_or_bytes_of_which_the_last_count() -> None:
    long = b"\x01" * 24 + (5).to_bytes(8)
    [event] = read_events(batch(stored(block_hashes=[long, 2**64 - 1], parent_block_hash=-1)))
    assert isinstance(event, Stored)
    assert (event.hashes, event.parent) == ((5, 2**63 - 1), 2**63 - 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"medium": "CPU"},
        {"group_idx": 1},
        {"kv_cache_spec_kind": "sliding_window"},
        {"lora_id": 3},
        {"lora_name": "sql"},
        {"extra_keys": [None, [["image", 0]]]},
        {"token_ids": [1, 2, 3]},
        {"token_ids": "1 2 3 4"},
        {"token_ids": [1, 2, 3, "x"]},
        {"block_size": 0},
        {"block_hashes": None},
        {"type": "BlockMoved"},
    ],
)
def test_what_says_nothing_of_a_prompts_tokens_on_the_gpu_is_left_out(changed: dict[str, object]) -> None:
    assert read_events(batch(stored(**changed), "x", [], 7)) == []


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode({"ts": 1}), b"\x91" * 5_000]
)
def test_what_is_no_batch_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="no batch"):
        read_events(data)
