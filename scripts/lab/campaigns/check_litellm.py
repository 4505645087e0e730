"""LiteLLM's proxy as a client of files and batches: OpenAI's client asks the proxy, which asks llmserve.

    python -m venv /tmp/litellm && /tmp/litellm/bin/pip install 'litellm[proxy]'
    python scripts/lab check_litellm --litellm /tmp/litellm/bin/litellm

LiteLLM needs other versions of its libraries than llmserve's tests, so it has an environment of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
from kit.servers import fake_engine, front_end, running

LINES = 20
CHAT = "/v1/chat/completions"
CONFIG = """
model_list:
  - model_name: fake
    litellm_params: {{model: openai/fake, api_base: {url}/v1, api_key: none}}
files_settings:
  - {{custom_llm_provider: openai, api_base: {url}/v1, api_key: none}}
"""
PROVIDER = {"provider": "openai"}


async def checked(litellm: Path) -> None:
    """Raises AssertionError, openai.APIError or TimeoutError when something does not work."""
    key = f"sk-{secrets.token_hex(16)}"
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = await stack.enter_async_context(fake_engine("fake", "--step-s", "0.005"))
        front = await stack.enter_async_context(
            front_end("behind LiteLLM", "--engine", engine.url, "--state", str(folder))
        )
        config = folder / "litellm.yaml"
        config.write_text(CONFIG.format(url=front.url))
        words = [str(litellm), "--config", str(config), "--host", "127.0.0.1"]
        environment = {
            **{"OPENAI_API_BASE": f"{front.url}/v1", "OPENAI_API_KEY": "none", "LITELLM_MASTER_KEY": key},
            **{"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""},
        }
        proxy = await stack.enter_async_context(
            running(
                "LiteLLM",
                lambda port: [*words, "--port", str(port)],
                ready="/health/liveliness",
                environment=environment,
            )
        )
        await _run_batch(openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=key, max_retries=0))


async def _run_batch(client: openai.AsyncOpenAI) -> None:
    body = '{"model":"fake","messages":[{"role":"user","content":"hello"}],"max_tokens":3}'
    lines = [f'{{"custom_id":"{n}","method":"POST","url":"{CHAT}","body":{body}}}\n' for n in range(LINES)]
    named: dict[str, Any] = {"extra_body": {"custom_llm_provider": "openai"}}
    file = await client.files.create(file=("in.jsonl", "".join(lines).encode()), purpose="batch", **named)
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"of": "a check"}, **named
    )
    async with asyncio.timeout(60):
        while batch.status not in ("completed", "failed", "expired"):
            await asyncio.sleep(0.1)
            batch = await client.batches.retrieve(batch.id, extra_query=PROVIDER)
    assert batch.status == "completed", batch
    assert batch.output_file_id is not None
    rows = (await client.files.content(batch.output_file_id, extra_query=PROVIDER)).text.splitlines()
    assert len(rows) == LINES, f"{len(rows)} of {LINES} answers came back"
    listed = [one.id for one in (await client.batches.list(limit=5, extra_query=PROVIDER)).data]
    assert listed == [batch.id], listed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", type=Path, required=True, help="LiteLLM's program")
    asyncio.run(checked(parser.parse_args().litellm))
    print("files and batches work through LiteLLM's proxy")
