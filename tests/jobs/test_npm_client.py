"""OpenAI's client for JavaScript, from npm, unchanged."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from batch_client import jsonl, request
from front import Front

pytestmark = pytest.mark.slow

PROGRAM = """
import fs from "node:fs";
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const file = await client.files.create({ file: fs.createReadStream("in.jsonl"), purpose: "batch" });
const made = { input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" };
let batch = await client.batches.create(made);
while (!["completed", "failed"].includes(batch.status)) {
  await new Promise((resolve) => setTimeout(resolve, 50));
  batch = await client.batches.retrieve(batch.id);
}
const listed = [];
for await (const one of client.batches.list({ limit: 1 })) listed.push(one.id);
const output = await (await client.files.content(batch.output_file_id)).text();
await client.files.delete(file.id);
console.log(JSON.stringify({ status: batch.status, listed: listed.length, rows: output.trim().split("\\n").length }));
"""


async def run(*words: str, folder: Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *words, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(120):
        output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_the_client_from_npm_runs_a_batch(front: Front, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    status, said = await run("npm", "install", "--silent", "openai", folder=tmp_path)
    if status != 0:
        pytest.skip(f"npm cannot install openai: {said[-200:]}")
    (tmp_path / "program.mjs").write_text(PROGRAM)
    (tmp_path / "in.jsonl").write_bytes(jsonl([request(number) for number in range(30)]))
    status, said = await run("node", "program.mjs", f"{front.url}/v1", folder=tmp_path)
    assert status == 0, said
    assert json.loads(said) == {"status": "completed", "listed": 1, "rows": 30}
