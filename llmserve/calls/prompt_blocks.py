"""Hashes of a prompt's blocks, by which prompts with the same beginning are known. No tokenizer is needed."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from llmserve.request import BLOCK_BYTES

HASH_BYTES = 6  # a number that each reader of JSON keeps exactly

CHARACTERS_PER_TOKEN = 4  # as calls/prompt_size.py begins with
URL_BYTES_MAX = 4_096  # a longer value is the medium itself
MEDIUM_BYTES_PER_TOKEN = 256  # of base64: a token of an image is some 28 x 28 points, or 200 bytes of a JPEG
MEDIUM_TOKENS, MEDIUM_TOKENS_MAX = 1_024, 16_384  # where only the address is known, and of a large medium

Piece = str | bytes | memoryview


def stand_in(medium: bytes | memoryview) -> bytes:
    """A text for an image, a sound or a file, as long as a text of as many tokens, by its size. medium : as in JSON"""
    size = len(medium)
    tokens = MEDIUM_TOKENS if size <= URL_BYTES_MAX else min(MEDIUM_TOKENS_MAX, size // MEDIUM_BYTES_PER_TOKEN)
    digest = blake2b(medium, digest_size=16).hexdigest().encode()
    return digest * max(1, CHARACTERS_PER_TOKEN * tokens // len(digest))


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
