"""`GET /admin/queue`, and the command that prints it."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from front import Front, StartFront, until

from llmserve.__main__ import main
from llmserve.engines.timed.server import FakeEngine
from llmserve.settings.tree import ApiConfig, ServerConfig


def key_files(folder: Path) -> dict[str, ServerConfig]:
    (folder / "admin").write_text("ops: secret\n")
    (folder / "keys").write_text("alice: a\nbob: b\n")
    return {
        "server": ServerConfig(
            port=0, admin_key_file=str(folder / "admin"), api_key_file=str(folder / "keys"), drain_s=0.0
        )
    }


async def run(front: Front, folder: Path, *flags: str) -> int:
    return await asyncio.to_thread(main, ["queue", front.url, "--admin-key-file", str(folder / "admin"), *flags])


async def test_the_queue_is_shown_by_model_share_and_bin(
    start_front: StartFront, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeEngine(step_s=0.05) as engine:
        front = await start_front(engine, slots=1, limits=ApiConfig(fair_by="key"), **key_files(tmp_path))
        keys = ["a", "a", "a", "b"]
        waiting = [
            asyncio.ensure_future(front.post(headers={"authorization": f"Bearer {key}"}, max_tokens=400).__aenter__())
            for key in keys
        ]
        await until(lambda: front.cluster.scheduler.waiting == 3 and engine.running == 1)
        async with front.session.get(f"{front.url}/admin/queue") as response:
            assert response.status == 401
        assert await run(front, tmp_path, "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert await run(front, tmp_path) == 0
        table = capsys.readouterr().out
        for request in waiting:
            request.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: not front.cluster.scheduler.requests)
        assert await run(front, tmp_path) == 0
    assert shown["waiting"] == 3
    counts = {(row["model"], row["share"], row["bin"]): row["waiting"] for row in shown["queues"]}
    assert counts == {("fake", "alice", 0): 2, ("fake", "bob", 0): 1}
    assert all(row["oldest_s"] >= 0.0 for row in shown["queues"])
    bound_s = shown["wait_bounds_s"]["fake"]
    assert bound_s > 0.0
    assert f"no request of fake waits longer than {bound_s:.1f} s" in table
    assert "alice" in table
    assert "3 requests wait" in table
    assert capsys.readouterr().out.endswith("0 requests wait\n")


async def test_the_servers_own_file_of_keys_is_read_by_commands_in_each_form(
    start_front: StartFront, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "admin.toml"
    path.write_text('[keys.ops]\nkey = "secret"\n')
    path.chmod(0o600)
    async with FakeEngine() as engine:
        front = await start_front(engine, server=ServerConfig(port=0, admin_key_file=str(path), drain_s=0.0))
        for words in (["queue", front.url], ["doctor", "--url", front.url, "--for-s", "0"]):
            assert await asyncio.to_thread(main, [*words, "--admin-key-file", str(path)]) == 0
    assert "0 requests wait" in capsys.readouterr().out


async def test_a_server_without_an_admin_key_says_how_to_start_it(
    start_front: StartFront, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_files(tmp_path)
    async with FakeEngine() as engine:
        front = await start_front(engine)
        assert await run(front, tmp_path) == 2
    assert "start it with --admin-key-file FILE" in capsys.readouterr().err


def test_a_wrong_url_and_an_absent_server_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key_files(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ["--admin-key-file", str(tmp_path / "admin")]
    assert main(["queue", "127.0.0.1:8000", *words]) == 2
    assert "must begin with http://" in capsys.readouterr().err
    assert main(["queue", f"http://127.0.0.1:{port}", *words]) == 1
    assert "does not answer" in capsys.readouterr().err
