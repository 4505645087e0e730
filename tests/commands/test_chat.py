"""`llmserve chat`: a question, a conversation, and what is said when there is no answer."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from front import StartFront

from llmserve.__main__ import main
from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.tree import ServerConfig


async def chat(*words: str) -> int:
    return await asyncio.to_thread(main, ["chat", *words])


async def test_a_question_gets_its_answer(start_front: StartFront, capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeEngine(output_tokens=3) as engine:
        front = await start_front(engine)
        assert await chat("Hello", "--url", f"{front.url}/v1/") == 0
    out, err = capsys.readouterr()
    assert len(out.split()) == 3
    assert err == ""


async def test_a_conversation_is_sent_as_a_whole(
    start_front: StartFront, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    async with FakeEngine(output_tokens=2) as engine:
        front = await start_front(engine)
        assert await chat("--url", front.url) == 0
        assert [len(json.loads(body)["messages"]) for body in engine.bodies] == [1, 3]
    assert len(capsys.readouterr().out.splitlines()) == 2


async def test_a_wrong_model_and_a_missing_key_are_one_line(
    start_front: StartFront, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "keys").write_text("me: sk\n")
    async with FakeEngine() as engine:
        front = await start_front(engine, server=ServerConfig(port=0, api_key_file=str(tmp_path / "keys")))
        assert await chat("Hello", "--url", front.url) == 2
        assert "give --key-file FILE" in capsys.readouterr().err
        words = ("--url", front.url, "--key-file", str(tmp_path / "keys"))
        assert await chat("Hello", *words, "--model", "nix") == 1
        assert "nix" in capsys.readouterr().err
        assert await chat("Hello", *words) == 0
