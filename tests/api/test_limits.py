"""Keys and their limits."""

from pathlib import Path

import pytest

from llmserve.api.limits import KeyLimits, read_keys
from llmserve.deadline_settings import DefaultDeadlines
from llmserve.errors import ConfigError, RateLimited, Unauthorized
from llmserve.settings import ApiConfig


def test_keys_are_read_with_or_without_names(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# our keys\nalice: sk-1\n\nsk-2\n")
    assert read_keys(path) == {"alice": "sk-1", "key4": "sk-2"}


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "alice: two words\n", "a: k\na: l\n", "a: k\nb: k\n", "alice:\n", "alice: clé\n"]
)
def test_an_unusable_key_file_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"keys"):
        read_keys(path)


def test_a_missing_key_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot read the API keys"):
        read_keys(Path("/nowhere/keys"))


def test_a_right_key_is_admitted_by_its_name() -> None:
    key_limits = KeyLimits({"alice": "sk-1", "bob": "sk-2"})
    assert key_limits.authenticate("Bearer sk-2") == "bob"
    assert key_limits.authenticate("bearer sk-1") == "alice"


@pytest.mark.parametrize("header", [None, "", "sk-1", "Basic sk-1", "Bearer ", "Bearer sk-3", "Bearer sk-1x"])
def test_a_missing_or_wrong_key_is_unauthorized(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        KeyLimits({"alice": "sk-1"}).authenticate(header)


def test_without_keys_every_client_is_admitted() -> None:
    assert KeyLimits({}).authenticate(None) == ""


def test_a_key_has_a_limit_of_requests_in_progress() -> None:
    key_limits = KeyLimits({}, concurrent_max=2)
    key_limits.acquire("alice")
    key_limits.acquire("alice")
    with pytest.raises(RateLimited, match="2 requests in progress"):
        key_limits.acquire("alice")
    key_limits.acquire("bob")
    key_limits.release("alice")
    key_limits.acquire("alice")


def test_a_key_has_a_limit_of_requests_per_minute_with_retry_after() -> None:
    now_s = [0.0]
    key_limits = KeyLimits({}, requests_per_minute_max=30, clock=lambda: now_s[0])
    for _ in range(30):
        key_limits.acquire("alice")
    with pytest.raises(RateLimited) as refusal:
        key_limits.acquire("alice")
    assert refusal.value.retry_after_s == pytest.approx(2.0)
    now_s[0] = 2.0
    key_limits.acquire("alice")
    with pytest.raises(RateLimited):
        key_limits.acquire("alice")


# ---- default deadlines ----


def test_default_deadlines_are_looked_up_by_key_then_stream_then_model() -> None:
    deadlines = DefaultDeadlines(("5000", "model:org/a:8b=2e3", "stream:chat=1000", "key:batch=60000"))
    assert deadlines.slo_s("batch", "chat", "org/a:8b") == 60
    assert deadlines.slo_s("alice", "chat", "org/a:8b") == 1
    assert deadlines.slo_s("alice", "alice", "org/a:8b") == 2
    assert deadlines.slo_s("alice", "alice", "other") == 5


def test_without_a_matching_default_there_is_no_deadline() -> None:
    assert DefaultDeadlines(()).slo_s("", "", "m") is None
    assert DefaultDeadlines(("key:batch=1", "stream:chat=1", "model:a=1")).slo_s("", "", "b") is None


@pytest.mark.parametrize(
    "text",
    [
        "soon",
        "0",
        "-1",
        "1e9",
        "nan",
        "=5",
        "batch=5",
        "keys:batch=5",
        "key:=5",
        "stream:=5",
        "key=5",
        "model:a",
        "model:a=",
    ],
)
def test_a_malformed_default_deadline_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ApiConfig(slo_ms=("5000", text))


def test_two_default_deadlines_for_one_key_are_an_error() -> None:
    with pytest.raises(ConfigError, match="key:a=2"):
        ApiConfig(slo_ms=("key:a=1", "key:a=2"))
