"""What batch jobs cost the server: large files, many finished jobs, many writers at once.

    python scripts/lab jobs.store --output docs/results/job-store.json

* A file of 50,000 lines and 200 MB: processor time of upload and validation, in the server and its processes, and the
  largest resident memory above that of the idle server.
* 50 clients at once upload a file and make a batch of it, each 10 times, without a retry.
* The start with 1,000 finished jobs in the store beside the start with an empty one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
from kit.progress import log
from kit.results import day_and_machine, write_json
from kit.servers import Server, fake_engine, front_end

CHAT = "/v1/chat/completions"
LINES, LINE_BYTES = 50_000, 4000
WRITERS, FILES_EACH = 50, 10
FINISHED = 1000
STARTS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    result = asyncio.run(_measured())
    if args.output is not None:
        write_json(args.output, {**result, "machine": day_and_machine()})
    return 0


async def _measured() -> dict[str, Any]:
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="llmserve-jobs-") as home:
        state = Path(home) / "state"
        await _start_s(Path(home) / "empty")  # makes the tables
        empty = [await _start_s(Path(home) / "empty") for _ in range(STARTS)]
        async with fake_engine("fake", "--slots", "64", "--step-s", "0") as engine:
            flags = ["--engine", engine.url, "--slots", "64", "--predictor", "none", "--state", str(state)]
            async with front_end("jobs", *flags) as front:
                result["large_file"] = await _large_file(front, Path(home) / "in.jsonl")
                log(result)
                result["writers"] = await _writers(front)
                log(result["writers"])
                await _finish(front, FINISHED - WRITERS * FILES_EACH)
        full = [await _start_s(state) for _ in range(STARTS)]
    names = ("store_opened_s", "store_opened_cpu_s", "tidied_s")
    result["start"] = {
        "finished_jobs": FINISHED,
        "empty": dict(zip(names, _medians(empty), strict=True)),
        "with_jobs": dict(zip(names, _medians(full), strict=True)),
    }
    log(result["start"])
    return result


def _medians(starts: list[list[float]]) -> list[float]:
    return [round(statistics.median(column), 3) for column in zip(*starts, strict=True)]


# ---- a large file ---------------------------------------------------------------------------------------------------


async def _large_file(front: Server, path: Path) -> dict[str, Any]:
    _write_large(path)
    client = _client(front)
    with _watched(front) as watched:
        before_s = watched.cpu_s()
        with path.open("rb") as file:
            uploaded = await client.files.create(file=file, purpose="batch")
        uploaded_s = watched.cpu_s()
        batch = await client.batches.create(
            input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h", metadata={"case": "large"}
        )
        while (batch := await client.batches.retrieve(batch.id)).status == "validating":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert batch.status == "in_progress", batch
        validated_s = watched.cpu_s()
        in_validation = watched.memory_max
        await client.batches.cancel(batch.id)
        await _ended(client, batch.id)
    return {
        "lines": LINES,
        "bytes": uploaded.bytes,
        "upload_cpu_s": round(uploaded_s - before_s, 2),
        "validation_cpu_s": round(validated_s - uploaded_s, 2),
        "memory_above_idle_mb": round((in_validation - watched.memory_idle) / 1e6, 1),
    }


def _write_large(path: Path) -> None:
    text = "word " * (LINE_BYTES // 5)
    with path.open("w") as file:
        for number in range(LINES):
            body = {"model": "fake", "max_tokens": 8, "messages": [{"role": "user", "content": f"{number} {text}"}]}
            line = json.dumps({"custom_id": f"request-{number}", "method": "POST", "url": CHAT, "body": body})
            file.write(line + "\n")


class _Watched:
    """Memory and processor time of a server and of all processes that it starts, sampled by a thread."""

    def __init__(self, front: Server) -> None:
        self._process = psutil.Process(front.process.pid)
        self._ended: dict[int, float] = {}
        self.memory_idle = self._memory()
        self.memory_max = self.memory_idle

    def _processes(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    def _memory(self) -> int:
        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def sample(self) -> None:
        self.memory_max = max(self.memory_max, self._memory())

    def cpu_s(self) -> float:
        """Processor time so far, with that of processes that have ended and were waited for."""
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total


@contextlib.contextmanager
def _watched(front: Server) -> Iterator[_Watched]:
    watched, done = _Watched(front), threading.Event()

    def sample() -> None:
        while not done.wait(0.01):
            watched.sample()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield watched
    finally:
        done.set()
        thread.join()


# ---- many writers ---------------------------------------------------------------------------------------------------


async def _writers(front: Server) -> dict[str, Any]:
    """Errors would end the benchmark: the clients do not try again."""
    seconds: list[float] = []

    async def write(client: openai.AsyncOpenAI, writer: int) -> None:
        for number in range(FILES_EACH):
            began_s = time.perf_counter()
            batch_id = await _one(client, f"{writer}-{number}")
            seconds.append(time.perf_counter() - began_s)
            assert batch_id

    client = _client(front)
    began_s = time.perf_counter()
    await asyncio.gather(*(write(client, writer) for writer in range(WRITERS)))
    total_s = time.perf_counter() - began_s
    async for batch in client.batches.list(limit=100):
        if batch.metadata != {"case": "large"}:
            assert (await _ended(client, batch.id)).status == "completed"
    return {
        "writers": WRITERS,
        "files_and_batches": len(seconds),
        "errors": 0,
        "per_s": round(len(seconds) / total_s, 1),
        "seconds_p50": round(statistics.median(seconds), 3),
        "seconds_max": round(max(seconds), 3),
    }


async def _one(client: openai.AsyncOpenAI, name: str) -> str:
    body = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": name}]}
    line = json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body}).encode()
    file = await client.files.create(file=("in.jsonl", line), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    return batch.id


async def _finish(front: Server, count: int) -> None:
    client = _client(front)
    for first in range(0, count, WRITERS):
        ids = await asyncio.gather(
            *(_one(client, f"{first}-{number}") for number in range(min(WRITERS, count - first)))
        )
        for batch_id in ids:
            await _ended(client, batch_id)


async def _ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    ends = ("completed", "cancelled", "failed")
    while (batch := await client.batches.retrieve(batch_id)).status not in ends:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return batch


def _client(front: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=600)


# ---- the start ------------------------------------------------------------------------------------------------------

OPEN = """
import asyncio, sys, time
from pathlib import Path
async def main():
    home = Path(sys.argv[1])
    home.mkdir(exist_ok=True)
    from llmserve.jobs.service import opened
    from llmserve.jobs.store.batches import BatchLimits
    from llmserve.jobs.store.files import FileLimits
    from llmserve.jobs.store.sqlite import sqlite_url
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    async with opened(sqlite_url(home / "jobs.sqlite"), home / "jobs", None, days=30, limits=FileLimits(),
                      batch_limits=BatchLimits(), tokens_queued_max=0, line_bytes_max=1, prompt_chars_max=1) as service:
        opened_s, opened_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        await service.tidy()
        tidied_s = time.perf_counter() - began_s
        print(opened_s, opened_cpu_s, tidied_s)
asyncio.run(main())
"""


async def _start_s(home: Path) -> list[float]:
    """Seconds until the store is open, processor time of that, and seconds until what has expired is deleted, too."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OPEN, str(home)), stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return [float(word) for word in output.split()]
