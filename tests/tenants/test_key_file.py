"""The file of keys: lines, and tables with the limits of each key."""

from pathlib import Path

import pytest
from processor_time import cpu_s

from llmserve.errors import ConfigError
from llmserve.tenants.key_file import Budgets, KeyFile, KeyPolicy, Limits, Price, read_key_file, read_keys


def test_keys_are_read_with_or_without_names(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# our keys\nalice: sk-1\n\nsk-2\n")
    assert read_keys(path) == {"alice": "sk-1", "key4": "sk-2"}


def test_the_keys_of_a_file_with_limits_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[keys.alice]\nkey = "sk-1"\nweight = 2\n\n[keys.bob]\nkey = "sk-2"\n')
    assert list(read_keys(path).items()) == [("alice", "sk-1"), ("bob", "sk-2")], "commands send the first one"


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


def test_a_missing_key_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match="cannot read the API keys"):
        read_keys(Path("/nowhere/keys"))


def test_the_time_to_read_keys_grows_as_their_number(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    for path, count in ((few, 2_000), (many, 20_000)):
        path.write_text("".join(f"name{number}: sk-{number}\n" for number in range(count)))
    assert cpu_s(lambda: read_keys(many)) < 30 * cpu_s(lambda: read_keys(few))


# ---- tables ----

WHOLE = """
[keys.alice]
key = "sk-1"
weight = 2.5
requests_per_minute = 60
tokens_per_minute = 100_000
tokens_waiting = 20_000
concurrent = 8
tokens_per_day = 1_000_000
money_per_month = 99.5
tiers = ["auto", "priority"]
priority = [-5, 5]

[keys.alice.models."org/llama:8b"]
tokens_per_minute = 1_000

[keys.bob]
key = "sk-2"

[prices."org/llama:8b"]
input = 0.5
output = 2
"""


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_table_says_all_of_a_key(tmp_path: Path) -> None:
    file = read_key_file(toml(tmp_path, WHOLE))
    assert file.keys == {"alice": "sk-1", "bob": "sk-2"}
    assert file.policies["alice"] == KeyPolicy(
        weight=2.5,
        limits=Limits(requests_per_minute=60, tokens_per_minute=100_000, tokens_waiting=20_000, concurrent=8),
        budgets=Budgets(tokens_per_day=1_000_000, money_per_month=99.5),
        models={"org/llama:8b": Limits(tokens_per_minute=1_000)},
        tiers=("auto", "priority"),
        priority=(-5, 5),
    )
    assert file.policies["bob"] == KeyPolicy()
    assert file.prices == {"org/llama:8b": Price(input=0.5, output=2.0)}
    assert file.prices["org/llama:8b"].of(1_000_000, 500_000) == 1.5


def test_a_key_may_ask_for_no_priority_unless_the_file_says_so() -> None:
    assert KeyPolicy().tiers == ("auto", "default", "flex")
    assert KeyPolicy().priority is None
    assert KeyPolicy().weight == 1.0


def test_lines_have_no_limits_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("alice: sk-1\n")
    assert read_key_file(path) == KeyFile(keys={"alice": "sk-1"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[keys.a]\nkey = 'k'\nweigth = 2\n", r"\[keys.a\]: unknown field 'weigth'; did you mean weight"),
        ("[keys.a]\nweight = 2\n", r"\[keys.a\]: the field 'key' is missing"),
        ("[keys.a]\nkey = 'k'\nweight = 0\n", r"\[keys.a\]: weight: expected a number, more than 0, not 0"),
        ("[keys.a]\nkey = 'k'\nweight = inf\n", r"\[keys.a\]: weight: the number must be finite"),
        ("[keys.a]\nkey = 'k'\nconcurrent = -1\n", r"\[keys.a\]: concurrent: expected a whole number, at least 0"),
        ("[keys.a]\nkey = 'k'\nconcurrent = '1'\n", r"\[keys.a\]: concurrent: expected a whole number"),
        ("[keys.a]\nkey = 'k'\ntiers = ['best']\n", r"\[keys.a\]: tiers: .*best"),
        ("[keys.a]\nkey = 'k'\npriority = [5]\n", r"\[keys.a\]: priority"),
        ("[keys.a]\nkey = 'k'\npriority = [5, 1]\n", r"\[keys.a\]: priority: the least comes first"),
        ("[keys.a]\nkey = 'k'\n[keys.a.models.m]\nweight = 1\n", r'\[keys.a.models."m"\]: unknown field .weight'),
        ("[keys.a]\nkey = 'k'\nmodels = 3\n", r"\[keys.a\]: models: "),
        ("[keys.a]\nkey = 'two words'\n", r"\[keys.a\]: not"),
        ("[keys.'a/b']\nkey = 'k'\n", r"has a slash"),
        ("[keys.a]\nkey = 'k'\n[keys.b]\nkey = 'k'\n", "two names have the same key"),
        ("[keys.a]\nkey = 'k'\nmoney_per_day = 1\n", r"\[keys.a\]: a budget of money needs prices"),
        ("[keys.a]\nkey = 'k'\ntokens_per_month = 0\n", r"\[keys.a\]: tokens_per_month: expected .* at least 1"),
        ("[keys.a]\nkey = 'k'\n[prices.m]\noutputs = 1\n", r'\[prices."m"\]: unknown field .outputs'),
        ("[key.a]\nkey = 'k'\n", r"unknown table \[key\]; did you mean keys"),
        ("keys = 'k'\n", r"\[keys\]: not a table"),
        ("[keys]\na = 'k'\n", r"\[keys.a\]: not a table"),
        ("[prices.m]\ninput = 1\n", "has no API key"),
        ("[keys.a\n", "line 1"),
    ],
)
def test_a_wrong_table_is_an_error_that_names_the_file_and_the_table(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"keys\.toml.*" + message):
        read_key_file(toml(tmp_path, text))


def test_an_error_never_quotes_a_key(tmp_path: Path) -> None:
    for text in ("[keys.a]\nkey = 'sk-secret\\u00e9'\n".replace("'", '"'), "[keys.a]\nkey = ['sk-secret']\n"):
        with pytest.raises(ConfigError) as error:
            read_key_file(toml(tmp_path, text))
        assert "sk-secret" not in str(error.value)


def test_a_keys_limits_go_before_the_servers() -> None:
    defaults = Limits(requests_per_minute=10, concurrent=4, tokens_per_minute=0)
    own = Limits(requests_per_minute=0, tokens_waiting=7)
    assert own.over(defaults) == Limits(requests_per_minute=0, concurrent=4, tokens_per_minute=0, tokens_waiting=7)


def test_the_guides_file_is_read(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs/guide/keys-and-limits.md").read_text()
    (table,) = [block for block in guide.split("```") if "[keys.alice]" in block]
    file = read_key_file(toml(tmp_path, table))
    assert file.policies["alice"].weight == 2
    assert file.policies["alice"].models["llama-8b"].tokens_per_minute == 20_000
    assert file.has_budgets
