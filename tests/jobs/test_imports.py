"""A server without a store pays nothing for batch jobs."""

from __future__ import annotations

import subprocess
import sys

LOADED = """
import asyncio, sys
from llmserve.server.serving import serving
from llmserve.settings.tree import Config, EngineConfig, ServerConfig
async def main():
    engines = EngineConfig(engine=("http://127.0.0.1:1",))
    async with serving(Config(server=ServerConfig(port=0), engines=engines)):
        print(*sorted({name.partition(".")[0] for name in sys.modules}))
asyncio.run(main())
"""


def test_an_ordinary_server_imports_nothing_of_a_store() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "llmserve" in loaded
    assert not {"sqlalchemy", "aiosqlite", "asyncpg"}.intersection(loaded)
