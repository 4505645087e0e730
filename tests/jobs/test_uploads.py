"""Uploads as they come over the wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import aiohttp
import psutil
import pytest
from front import Front, until

from llmserve.jobs import uploads
from llmserve.jobs.store.folder import Appended

BOUNDARY = "limit"
TYPE = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
PURPOSE = b'--limit\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--limit\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
END = b"\r\n--limit--\r\n"


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "state" / "jobs").iterdir())


async def post(front: Front, body: bytes | AsyncIterator[bytes], **headers: str) -> tuple[int, dict[str, object]]:
    async with front.session.post(f"{front.url}/v1/files", data=body, headers={**TYPE, **headers}) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("body", [PURPOSE + FILE + b"abc" + END, FILE + b"abc\r\n" + PURPOSE + END[2:]])
async def test_fields_come_in_any_order(front: Front, body: bytes) -> None:
    status, file = await post(front, body)
    assert (status, file["bytes"], file["filename"]) == (200, 3, "in.jsonl")


async def test_any_cut_between_two_packets_gives_the_same_file(front: Front) -> None:
    body = PURPOSE + FILE + b"ab\r\n--limi\r\n--limit-\r\r\n\n" + END

    async def one_by_one() -> AsyncIterator[bytes]:
        for place in range(len(body)):
            yield body[place : place + 1]

    status, file = await post(front, one_by_one())
    async with front.session.get(f"{front.url}/v1/files/{file['id']}/content") as answer:
        assert await answer.read() == b"ab\r\n--limi\r\n--limit-\r\r\n\n"
    assert status == 200


@pytest.mark.parametrize(
    ("body", "headers", "param", "code"),
    [
        (b"{}", {"content-type": "application/json"}, None, "invalid_content_type"),
        (b"no boundary", {}, None, "invalid_body"),
        (PURPOSE + FILE + b"abc", {}, None, "invalid_body"),
        (PURPOSE[:-2] + END, {}, "file", "missing_required_parameter"),
        (FILE + b"abc" + END, {}, "purpose", "missing_required_parameter"),
        (PURPOSE + FILE + b"abc\r\n" + FILE + b"abc" + END, {}, "file", "invalid_value"),
        (PURPOSE.replace(b"batch", b"b" * 5000) + FILE + END, {}, "purpose", "invalid_value"),
        (PURPOSE * 40 + FILE + b"abc" + END, {}, None, None),
    ],
)
async def test_a_body_that_is_no_upload_is_refused_and_leaves_nothing(
    front: Front, tmp_path: Path, body: bytes, headers: dict[str, str], param: str | None, code: str | None
) -> None:
    if code is None:
        body = b"".join([PURPOSE.replace(b"purpose", b"field%d" % number) for number in range(40)]) + FILE + END
        code = "invalid_body"
    status, answer = await post(front, body, **headers)
    assert status == 400
    assert isinstance(answer["error"], dict)
    assert (answer["error"]["param"], answer["error"]["code"]) == (param, code)
    assert kept(tmp_path) == []


async def test_a_file_too_large_is_refused_while_it_comes(front: Front, tmp_path: Path) -> None:
    with mock.patch.object(uploads, "FILE_BYTES_MAX", 100_000):

        async def endless() -> AsyncIterator[bytes]:
            yield PURPOSE + FILE
            while True:
                yield b"x" * 10_000

        try:
            status, _ = await post(front, endless())
        except aiohttp.ClientError:  # the server closed before this client had read the answer
            status = 413
    assert status == 413
    await until(lambda: kept(tmp_path) == [])


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(front: Front, tmp_path: Path) -> None:
    host, port = front.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {TYPE['content-type']}\r\ncontent-length: 99999\r\n\r\n"
    )
    writer.write(head.encode() + PURPOSE + FILE + b"x" * 5000)
    await until(lambda: [path.stat().st_size for path in kept(tmp_path)] == [5000])
    writer.close()
    await until(lambda: kept(tmp_path) == [])


async def test_a_slow_disk_holds_the_client_back_and_no_online_request(front: Front) -> None:
    """20 MB that are written at some 20 MB/s never fill the memory."""
    write, most, process = Appended.write, 0, psutil.Process()
    idle = process.memory_info().rss

    def slow(file: Appended, data: bytes) -> None:
        nonlocal most
        most = max(most, len(data))
        time.sleep(len(data) / 20e6)
        write(file, data)

    async def large() -> AsyncIterator[bytes]:
        yield PURPOSE + FILE
        for _ in range(320):
            yield bytes(1 << 16)
        yield END

    with mock.patch.object(Appended, "write", slow):
        uploading = asyncio.create_task(post(front, large()))
        async with front.post() as answer:
            assert answer.status == 200
        assert not uploading.done()
        status, file = await uploading
    assert (status, file["bytes"]) == (200, 320 << 16)
    assert most < 2 * uploads.WAITING_BYTES_MAX
    assert process.memory_info().rss - idle < 60e6


async def test_a_wrong_head_is_answered_without_the_body(front: Front) -> None:
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\ncontent-length: 99999\r\n\r\n")
    assert b" 400 " in await asyncio.wait_for(reader.readline(), 30)
    writer.close()


async def test_a_client_that_leaves_while_the_last_bytes_are_written_leaves_no_traceback(
    front: Front, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = front.url.removeprefix("http://").split(":")
    body = PURPOSE + FILE + b"x" * 5_000 + END
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: {TYPE['content-type']}\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    write, began = Appended.write, False

    def slow(file: Appended, data: bytes) -> None:
        nonlocal began
        began = True
        time.sleep(0.2)
        write(file, data)

    with mock.patch.object(Appended, "write", slow):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        await until(lambda: began)
        writer.transport.abort()
        await until(lambda: kept(tmp_path) == [])
    await asyncio.sleep(0.05)
    assert not [record for record in caplog.records if record.exc_info]
