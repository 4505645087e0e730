"""The messages of vLLM and SGLang about their prefix caches.

A message is a topic, a number of 8 bytes and a batch: `[time, events, rank]` in msgpack. An event is a map with a
`type`, or in older versions and in SGLang an array that begins with the type. Fields that are not read may be anything.

Sources: vllm/distributed/kv_events.py of vLLM 0.32.0; python/sglang/srt/disaggregation/kv_events.py of SGLang 0.5.12.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

LONGEST = 1 << 20  # tokens in one event: a longer list is no prompt
FULL = "full"  # the kind of a cache group of full attention begins so; others drop what their window has left
GPU = ("GPU", "gpu", None, "")  # where a block is; elsewhere it must be copied first
FIELDS = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
REMOVED_FIELDS = ("type", "block_hashes", "medium")
HASH_BITS = 63

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


class Stored(msgspec.Struct, frozen=True):
    """Blocks that follow each other. parent : the block before the first; None: they begin a prompt"""

    hashes: tuple[int, ...]
    parent: int | None
    tokens: list[int]
    block_size: int


class Removed(msgspec.Struct, frozen=True):
    hashes: tuple[int, ...]


class Cleared(msgspec.Struct, frozen=True):
    """The whole cache is empty."""


CacheEvent = Stored | Removed | Cleared


def read_events(batch: bytes) -> list[CacheEvent]:
    """The events of a batch that tell of prompts' blocks on the GPU. Raises ValueError for what is no batch."""
    try:
        said = _decoder.decode(batch)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no batch of events: {error}") from None
    if not isinstance(said, list) or len(said) < 2 or not isinstance(said[1], list):
        raise ValueError("no batch of events")
    return list(_known(said[1]))


def _known(events: Sequence[object]) -> Iterator[CacheEvent]:
    for said in events:
        event = _event(said)
        if event is not None:
            yield event


def _event(said: object) -> CacheEvent | None:
    if isinstance(said, dict):
        fields = said
    elif isinstance(said, list) and said:
        fields = dict(zip(REMOVED_FIELDS if said[0] == "BlockRemoved" else FIELDS, said, strict=False))
    else:
        return None
    kind = fields.get("type")
    if kind == "AllBlocksCleared":
        return Cleared()
    hashes = fields.get("block_hashes")
    if kind not in ("BlockStored", "BlockRemoved") or not isinstance(hashes, list) or _is_elsewhere(fields):
        return None
    numbers = tuple([_number(value) for value in hashes])
    return Removed(numbers) if kind == "BlockRemoved" else _stored(fields, numbers)


def _is_elsewhere(fields: dict[str, Any]) -> bool:
    """Whether an event is of a copy in other memory, or of layers whose blocks say nothing about whole prompts."""
    kind = fields.get("kv_cache_spec_kind")
    partial = isinstance(kind, str) and not kind.startswith(FULL)
    return fields.get("medium") not in GPU or bool(fields.get("group_idx")) or partial


def _stored(fields: dict[str, Any], hashes: tuple[int, ...]) -> Stored | None:
    """None: blocks that hold more than the tokens say (adapters, images, salts), which no tokenizer tells."""
    tokens, size, parent = fields.get("token_ids"), fields.get("block_size"), fields.get("parent_block_hash")
    more = fields.get("extra_keys") or ()
    if fields.get("lora_id") is not None or fields.get("lora_name") or any(keys for keys in more):
        return None
    if not isinstance(tokens, list) or not isinstance(size, int) or size < 1 or len(tokens) > LONGEST:
        return None
    if len(tokens) != size * len(hashes) or not all(type(token) is int for token in tokens):
        return None
    return Stored(hashes, None if parent is None else _number(parent), tokens, size)


def _number(value: object) -> int:
    """A block's hash as a number of HASH_BITS: engines have numbers of 64 bits, or bytes."""
    if isinstance(value, bytes):
        value = int.from_bytes(value[-8:])
    return value & ((1 << HASH_BITS) - 1) if isinstance(value, int) else 0
