"""Keys that are created, revoked and hashed in the file of keys, by the command and by /admin."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from front import StartFront, until

from llmserve.__main__ import main
from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import ConfigError, Unauthorized
from llmserve.settings.tree import ServerConfig
from llmserve.tenants.authentication import Keys
from llmserve.tenants.key_editing import create_key, hash_keys, revoke_key
from llmserve.tenants.key_file import hashed, read_key_file, read_key_to_send

TABLES = """# who pays
[keys.alice]        # of the first team
key = "sk-alice"
weight = 2

[keys.alice.models."llama-8b"]
tokens_per_minute = 20_000

# the second team
[keys."bob the builder"]
key = 'sk-bob'

[prices."llama-8b"]
input = 0.1
"""


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(TABLES)
    path.chmod(0o640)
    return path


def text_of(path: Path) -> str:
    return path.read_text()


def named(path: Path, key: str) -> str:
    return Keys(read_key_file(path).keys).authenticate(f"Bearer {key}")


@pytest.mark.parametrize("name", ["keys", "keys.toml"])
def test_a_key_is_created_where_nobody_can_read_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    key, other = create_key(path, "alice", {}), create_key(path, "bob", {})
    assert key not in path.read_text()
    assert key.startswith("sk-")
    assert (named(path, key), named(path, other)) == ("alice", "bob")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Unauthorized):
        named(path, hashed(key))
    with pytest.raises(ConfigError, match="has a key named 'alice' already"):
        create_key(path, "alice", {})
    revoke_key(path, "alice")
    assert list(read_key_file(path).keys) == ["bob"]
    with pytest.raises(Unauthorized):
        named(path, key)


def test_the_last_key_stays_for_without_keys_a_server_would_serve_anyone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\nalice: sk-1\n")
    with pytest.raises(ConfigError, match=r"keys has no API key"):
        revoke_key(path, "alice")
    assert path.read_text() == "# keys\nalice: sk-1\n"
    assert list(tmp_path.iterdir()) == [path], "no draft is left"


def test_comments_order_limits_and_mode_stay(tables: Path) -> None:
    create_key(tables, "carol.c", {"requests_per_minute": 60, "tiers": ["flex"], "weight": 0.5})
    policy = read_key_file(tables).policies["carol.c"]
    assert (policy.limits.requests_per_minute, policy.tiers, policy.weight) == (60, ("flex",), 0.5)
    assert tables.read_text().startswith(TABLES)
    revoke_key(tables, "carol.c")
    assert tables.read_text().strip() == TABLES.strip()
    assert tables.stat().st_mode & 0o777 == 0o640
    revoke_key(tables, "alice")
    assert tables.read_text() == "# who pays\n\n" + TABLES[TABLES.index("# the second team") :]


def test_what_cannot_be_changed_safely_is_left(tables: Path) -> None:
    tables.write_text('keys.alice = {key = "sk-1"}\nkeys.bob = {key = "sk-2"}\n')
    before = tables.read_text()
    with pytest.raises(ConfigError, match="change it by hand"):
        revoke_key(tables, "alice")
    with pytest.raises(ConfigError, match=r"keys\.toml: \[keys\.x\]: unknown field 'wieght'"):
        create_key(tables, "x", {"wieght": 2})
    with pytest.raises(ConfigError, match="models: give it in the file"):
        create_key(tables, "x", {"models": {}})
    with pytest.raises(ConfigError, match="has a slash"):
        create_key(tables, "x/y", {})
    assert tables.read_text() == before


@pytest.mark.parametrize("text", [TABLES, "# team\nalice: sk-alice\nbob the builder: sk-bob\n"])
def test_keys_that_can_be_read_are_hashed(tmp_path: Path, text: str) -> None:
    path = tmp_path / ("keys.toml" if text == TABLES else "keys")
    path.write_text(text)
    assert read_key_to_send(path) == "sk-alice"
    assert hash_keys(path) == 2
    assert "sk-" not in path.read_text()
    assert path.read_text().count("#") == text.count("#")
    assert (named(path, "sk-alice"), named(path, "sk-bob")) == ("alice", "bob the builder")
    assert hash_keys(path) == 0
    with pytest.raises(ConfigError, match="has the digest of its first key"):
        read_key_to_send(path)


def test_a_key_and_its_digest_are_the_same_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"a: sk-1\nb: {hashed('sk-1')}\n")
    with pytest.raises(ConfigError, match="in the file twice"):
        read_key_file(path)
    path.write_text(f"{hashed('sk-1')}\n")
    assert named(path, "sk-1") == "key1", "a digest without a name is a key without a name"


def test_the_command_creates_lists_and_revokes(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flag = ["--api-key-file", str(tables)]
    assert main(["keys", "create", "carol", "requests_per_minute=60", *flag]) == 0
    key = capsys.readouterr().out.strip()
    assert named(tables, key) == "carol"
    assert main(["keys", "list", *flag]) == 0
    shown = capsys.readouterr().out
    assert "requests_per_minute 60" in shown
    assert "sk-" not in shown
    assert main(["keys", "revoke", "carol", *flag]) == 0
    assert main(["keys", "hash", *flag]) == 0
    assert "2 keys were hashed" in capsys.readouterr().out
    assert main(["keys", "revoke", "carol", *flag]) == 2
    assert "has no key named 'carol'" in capsys.readouterr().err
    assert main(["keys", "create", *flag]) == 2


async def test_admin_creates_lists_and_revokes_keys_at_once(start_front: StartFront, tables: Path) -> None:
    (tables.parent / "admin").write_text("admin\n")
    async with FakeEngine(step_s=0.02) as engine:
        server = ServerConfig(port=0, api_key_file=str(tables), admin_key_file=str(tables.parent / "admin"))
        front = await start_front(engine, server=server)

        async def admin(method: str, path: str = "", body: Any = None, key: str = "admin") -> tuple[int, Any]:
            headers = {"authorization": f"Bearer {key}"}
            url = f"{front.url}/admin/keys{path}"
            async with front.session.request(method, url, headers=headers, json=body) as response:
                return response.status, await response.json()

        async def status(key: str, tokens: int = 2) -> int:
            async with front.post(headers={"authorization": f"Bearer {key}"}, max_tokens=tokens) as response:
                await response.read()
                return int(response.status)

        code, made = await admin("POST", body={"name": "carol", "requests_per_minute": 2})
        assert (code, made["name"]) == (201, "carol")
        in_flight = asyncio.ensure_future(status(made["key"], tokens=30))
        await until(lambda: engine.running == 1)
        _, listed = await admin("GET")
        rows = {row["name"]: row for row in listed["keys"]}
        assert rows["carol"] == {"name": "carol", "hashed": True, "weight": 1.0, "limits": {"requests_per_minute": 2}}
        assert not rows["alice"]["hashed"]
        assert (await admin("DELETE", "/carol"))[0] == 200
        assert await in_flight == 200, "what runs ends normally"
        assert [await status(key) for key in (made["key"], "sk-alice")] == [401, 200]
        before = text_of(tables)
        for method, path, body in (
            ("DELETE", "/carol", None),
            ("POST", "", {"name": "x", "tokens_per_day": 5}),  # a budget needs a file that keeps it
            ("POST", "", {"name": 5}),
            ("POST", "", [1]),
        ):
            assert (await admin(method, path, body))[0] == 400
        assert text_of(tables) == before
        assert (await admin("GET", key="sk-alice"))[0] == 401
