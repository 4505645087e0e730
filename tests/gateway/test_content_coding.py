"""Packed bodies: gzip, deflate and zstd are unpacked within the limit of a body, and anything else is refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from front import Front, StartFront

from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import BadRequest, BodyTooLarge
from llmserve.gateway.content_coding import MEMBERS_MAX, unpacked
from llmserve.settings.tree import ApiConfig

CHAT = json.dumps({"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}).encode()
MOST = 1 << 20


def raw_deflate(data: bytes) -> bytes:
    packing = zlib.compressobj(wbits=-15)
    return packing.compress(data) + packing.flush()


def members(data: bytes) -> bytes:
    return b"".join([gzip.compress(data[start : start + 7]) for start in range(0, len(data), 7)]) + bytes(512)


PACKINGS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("GZIP", members),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstandard.compress),
    ("zstd", lambda data: zstandard.compress(data[:9]) + zstandard.compress(data[9:])),
    ("identity", bytes),
    ("deflate, gzip", lambda data: gzip.compress(zlib.compress(data))),
]


def post(front: Front, data: bytes, coding: str) -> Any:
    return front.session.post(front.url + "/v1/chat/completions", data=data, headers={"content-encoding": coding})


@pytest.mark.parametrize(("coding", "pack"), PACKINGS)
async def test_the_engine_gets_the_unpacked_body(
    start_front: StartFront, coding: str, pack: Callable[[bytes], bytes]
) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with post(front, pack(CHAT), coding) as answer:
            assert answer.status == 200, await answer.text()
            assert (await answer.json())["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, br", "gzip, gzip, gzip", "zip"])
async def test_another_coding_is_refused_with_those_that_are_taken(start_front: StartFront, coding: str) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with post(front, CHAT, coding) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, answer.headers["accept-encoding"]) == (415, "gzip, deflate, zstd")
            assert "this server takes gzip, deflate, zstd" in error["message"]


@pytest.mark.parametrize(("coding", "pack"), [packing for packing in PACKINGS if packing[0] != "identity"])
async def test_a_body_that_unpacks_to_too_much_is_refused(
    start_front: StartFront, coding: str, pack: Callable[[bytes], bytes]
) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, limits=ApiConfig(body_bytes_max=3_000))
        async with post(front, pack(CHAT[:-1] + b" " * 4_000 + b"}"), coding) as answer:
            assert answer.status == 413, await answer.text()
        async with post(front, pack(CHAT), coding) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("gzip", CHAT),
        ("gzip", gzip.compress(CHAT, mtime=0)[:-9]),
        ("gzip", gzip.compress(CHAT, mtime=0) + b"rest"),
        ("gzip", gzip.compress(CHAT, mtime=0)[:-4] + b"abcd"),
        ("deflate", zlib.compress(CHAT)[:-1]),
        ("deflate", zlib.compress(CHAT) + b"rest"),
        ("deflate", b"\x78\x9cnonsense"),
        ("zstd", CHAT),
        ("zstd", zstandard.compress(CHAT * 9)[:-3]),
        ("gzip", b""),
    ],
)
async def test_a_body_that_is_not_what_it_says_is_a_bad_request(
    start_front: StartFront, coding: str, data: bytes
) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        async with post(front, data, coding) as answer:
            assert answer.status == 400, await answer.text()


def nested_bomb(size: int) -> bytes:
    return gzip.compress(gzip.compress(bytes(size), mtime=0), mtime=0)


@pytest.mark.parametrize(
    ("codings", "data"),
    [
        (["gzip"], gzip.compress(bytes(300 << 20), mtime=0)),
        (["gzip", "gzip"], nested_bomb(300 << 20)),
        (["deflate"], zlib.compress(bytes(300 << 20))),
        (["zstd"], zstandard.compress(bytes(300 << 20))),
        (["zstd"], zstandard.compress(bytes(30 << 20)) * 10),
    ],
)
def test_a_bomb_costs_no_more_than_a_body(codings: list[str], data: bytes) -> None:
    began_s = time.process_time()
    with pytest.raises(BodyTooLarge, match="--body-bytes-max"):
        unpacked(data, codings, MOST)
    bomb_s, began_s = time.process_time() - began_s, time.process_time()
    for _ in range(20):
        unpacked(gzip.compress(os.urandom(MOST - 1024), compresslevel=1), ["gzip"], MOST)
    assert bomb_s < time.process_time() - began_s


def test_many_empty_members_are_refused() -> None:
    empty = gzip.compress(b"")
    assert unpacked(empty * MEMBERS_MAX, ["gzip"], MOST) == b""
    with pytest.raises(BadRequest, match="members"):
        unpacked(empty * 100_000, ["gzip"], MOST)


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 500_000])
@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, raw_deflate, zstandard.compress])
def test_any_size_is_unpacked_to_what_was_packed(pack: Callable[[bytes], bytes], size: int) -> None:
    coding = {gzip.compress: "gzip", zstandard.compress: "zstd"}.get(pack, "deflate")
    for data in (bytes(size), os.urandom(size)):
        assert unpacked(pack(data), [coding], MOST) == data


async def test_what_is_unpacked_counts_as_held_and_is_forgotten(start_front: StartFront) -> None:
    body = CHAT[:-1] + b" " * 200_000 + b"}"
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, limits=ApiConfig(buffers_bytes_max=100_000))
        async with post(front, gzip.compress(body), "gzip") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "buffers_full")
        async with post(front, gzip.compress(CHAT), "gzip") as answer:
            assert answer.status == 200


async def test_the_event_loop_goes_on_while_a_large_body_is_unpacked(start_front: StartFront) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine)
        large = gzip.compress(CHAT[:-1] + b" " * (15 << 20) + b"}")
        sending = asyncio.gather(*[post(front, large, "gzip") for _ in range(3)])
        while not sending.done():
            async with front.session.get(front.url + "/health") as answer:
                assert answer.status == 200
        assert [answer.status for answer in await sending] == [200, 200, 200]
