"""Keys and their limits."""

import time
from collections.abc import Callable
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


@pytest.mark.parametrize(
    "line", ["\ufeffalice: sk-1", "alice: sk\0", "al\x1bice: sk", "alice: sk\x7f", "al\u2028ice: k"]
)
def test_a_character_that_cannot_be_seen_is_an_error_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\nbob: sk-0\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 3: the character '\\[xu]\w+' is not printable"):
        read_keys(path)


def test_keys_of_windows_editors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"alice:\tsk-1\r\nbob: sk-2\r\n")
    assert read_keys(path) == {"alice": "sk-1", "bob": "sk-2"}


def test_a_name_with_a_slash_is_an_error(tmp_path: Path) -> None:
    """The key alice could claim the stream alice/night, too."""
    path = tmp_path / "keys"
    path.write_text("alice: sk-1\nalice/night: sk-2\n")
    with pytest.raises(ConfigError, match="line 2: the name 'alice/night' has a slash"):
        read_keys(path)


def test_a_key_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys"
    path.write_text("alice: sk-1\n")
    path.chmod(0o600)
    read_keys(path)
    assert not caplog.records
    for mode in (0o640, 0o604):
        caplog.clear()
        path.chmod(mode)
        read_keys(path)
        assert f"run `chmod 600 {path}`" in caplog.text


def test_a_group_that_another_user_lets_read_a_file_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As secrets are mounted in pods."""
    path = tmp_path / "keys"
    path.write_text("alice: sk-1\n")
    path.chmod(0o640)
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    read_keys(path)
    assert not caplog.records
    path.chmod(0o644)
    read_keys(path)
    assert f"run `chmod 640 {path}`" in caplog.text


def cpu_s(work: Callable[[], object]) -> float:
    """Least CPU time of three runs."""
    times = []
    for _ in range(3):
        since_s = time.process_time()
        work()
        times.append(time.process_time() - since_s)
    return min(times)


def test_the_time_to_read_keys_grows_as_their_number(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    for path, count in ((few, 2_000), (many, 20_000)):
        path.write_text("".join(f"name{number}: sk-{number}\n" for number in range(count)))
    assert cpu_s(lambda: read_keys(many)) < 30 * cpu_s(lambda: read_keys(few))


def test_a_key_is_found_as_fast_among_many_as_among_few() -> None:
    def refuse(limits: KeyLimits) -> None:
        for _ in range(300):
            with pytest.raises(Unauthorized):
                limits.authenticate("Bearer wrong")

    few, many = (KeyLimits({f"name{number}": f"sk-{number}" for number in range(count)}) for count in (20, 20_000))
    assert cpu_s(lambda: refuse(many)) < 5 * cpu_s(lambda: refuse(few))


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
