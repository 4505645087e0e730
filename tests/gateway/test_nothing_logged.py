"""SECURITY.md's promise: no prompt and no key appears in the log, the journal or /metrics, whatever fails."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from front import StartFront

from llmserve.engines.timed.server import FakeEngine, Fault
from llmserve.runtime.logs import JsonLines, TextLines
from llmserve.settings.tree import ServerConfig

SECRETS = ("marzipan", "sk-right-key", "sk-wrong-key")


@pytest.mark.parametrize("fault", [Fault(), Fault("500"), Fault("close_mid_stream", after_tokens=1)])
async def test_no_prompt_and_no_key_is_written_anywhere(
    fault: Fault, start_front: StartFront, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, journal = tmp_path / "keys", tmp_path / "journal.jsonl"
    keys.write_text("me: sk-right-key\n")
    caplog.set_level(logging.DEBUG, logger="llmserve")
    messages = [{"role": "user", "content": "Tell me of marzipan"}]
    async with FakeEngine(slots=1, step_s=0.001) as engine:
        settings = ServerConfig(port=0, api_key_file=str(keys), journal=str(journal), access_log=True)
        front = await start_front(engine, server=settings)
        engine.fault = fault
        for key, fields, streamed in (
            ("sk-right-key", {}, False),
            ("sk-right-key", {}, True),
            ("sk-wrong-key", {}, False),
            ("sk-right-key", {"max_tokens": "marzipan"}, False),
            ("sk-right-key", {"model": "another"}, False),
        ):
            headers = {"authorization": f"Bearer {key}"}
            async with front.post(headers=headers, **{"messages": messages, "stream": streamed, **fields}) as answer:
                await answer.read()
        async with front.session.get(f"{front.url}/metrics") as answer:
            metrics = await answer.text()
        front.cluster.journal.close()
        bodies = b"".join(engine.bodies)
    assert b"marzipan" in bodies, "the engine must get the prompt"
    steps = journal.read_text()
    assert "RequestArrived" in steps, "the journal must be complete"
    lines = "".join([f"{TextLines().format(record)}{JsonLines().format(record)}" for record in caplog.records])
    assert "request_id=" in lines, "the lines must have their fields"
    written = lines + metrics + steps
    assert [secret for secret in SECRETS if secret in written] == []
