"""Hashes of a prompt's blocks, by which prompts with the same beginning are known. No tokenizer is needed."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

BLOCK_BYTES = 512  # some 128 tokens of English
HASH_BYTES = 6  # a number that each reader of JSON keeps exactly

Piece = str | bytes | memoryview


def prompt_blocks(pieces: Sequence[Piece], model: str, secret: bytes) -> tuple[tuple[int, ...], float]:
    """(hashes, each block's share of the prompt) of the whole blocks of a prompt.

    A hash is of the model and of the prompt from its beginning to the block's end, so prompts with a common beginning
    have their first hashes in common.

    pieces : in the order of the engine's template.  secret : hides the prompts from a journal
    """
    if sum(map(len, pieces)) < BLOCK_BYTES:
        return (), 0.0
    text = b"\n".join([piece.encode(errors="replace") if isinstance(piece, str) else piece for piece in pieces])
    whole = blake2b(model.encode(errors="replace"), key=secret, digest_size=HASH_BYTES)
    size, hashes = len(text), []
    view = memoryview(text)
    for end in range(BLOCK_BYTES, size + 1, BLOCK_BYTES):
        whole.update(view[end - BLOCK_BYTES : end])
        hashes.append(int.from_bytes(whole.copy().digest()))
    return tuple(hashes), BLOCK_BYTES / size
