"""Hashes of a prompt's blocks."""

import pytest

from llmserve.calls.prompt_blocks import prompt_blocks, stand_in
from llmserve.request import BLOCK_BYTES


def hashes(*pieces: str | bytes, model: str = "m", secret: bytes = b"secret") -> tuple[int, ...]:
    return prompt_blocks(pieces, model, secret)[0]


def test_prompts_share_the_hashes_of_their_common_beginning() -> None:
    common = "a system prompt " * 100
    first, second = hashes(common + "one" * 300), hashes(common + "two" * 300)
    shared = len(common) // BLOCK_BYTES
    assert (len(first), first[:shared]) == ((len(common) + 900) // BLOCK_BYTES, second[:shared])
    assert not set(first[shared:]) & set(second), "what follows a difference has other hashes, even where it is equal"
    assert hashes("x" * 2_000 + common)[4:] != hashes("y" * 2_000 + common)[4:]


def test_a_conversation_goes_on_from_its_blocks() -> None:
    turns = ["system", "s" * 700, "user", "u" * 700, "assistant", "a" * 700]
    before, after = hashes(*turns), hashes(*turns, "user", "more")
    assert before == after[: len(before)]
    assert len(before) == 4


def test_each_block_is_an_equal_share_of_the_prompt() -> None:
    assert prompt_blocks(["x" * 2_048], "m", b"")[1] == 0.25
    assert prompt_blocks(["é" * 1_024], "m", b"")[1] == 0.25, "a block has so many bytes"
    assert prompt_blocks([b"x" * 1_000, memoryview(b"y" * 1_047)], "m", b"")[1] == 0.25


@pytest.mark.parametrize("pieces", [(), ("hello",), ("x" * 511,), ("x" * 250, "y" * 250)])
def test_a_short_prompt_has_no_blocks(pieces: tuple[str, ...]) -> None:
    assert prompt_blocks(pieces, "m", b"") == ((), 0.0)


def test_hashes_differ_by_secret_and_by_model_and_every_text_has_them() -> None:
    text = "x" * 600
    assert len({hashes(text), hashes(text, secret=b"another"), hashes(text, model="another")}) == 3
    assert hashes("\ud800" * 600), "half a surrogate pair is a prompt like any other"
    assert max(hashes("x" * 100_000)) < 2**53, "exact in each reader of JSON"


def test_a_medium_counts_as_a_text_of_its_size() -> None:
    small, large = b"a" * 100_000, b"a" * 1_000_000
    assert [len(stand_in(medium)) // 4 for medium in (b"https://a/b.png", small, large)] == [1_024, 384, 3_904]
    assert len(stand_in(b"a" * 100_000_000)) == 65_536
    assert stand_in(small) == stand_in(small) != stand_in(b"b" * 100_000)
