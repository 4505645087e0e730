"""Runs the clients of npm_clients.mjs."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_suffix(".mjs")
RUN_S = 120


async def from_npm(client: str, url: str, model: str, embedder: str = "none") -> list[Any]:
    """What a client made of a server's answers. url : base URL, without /v1"""
    folder = os.environ.get("CLIENTS_NPM")
    if not folder:
        pytest.skip("CLIENTS_NPM is not set: run ./scripts/test, which installs the clients where Node.js is")
    process = await asyncio.create_subprocess_exec(
        *("node", "--input-type=module", "-", client, url, model, embedder),
        cwd=folder,  # where the program's imports are found
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_S):
            output, errors = await process.communicate(PROGRAM.read_bytes())
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, errors.decode()
    values: list[Any] = json.loads(output)
    return values
