"""From files to rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from predictor.dataset import Columns, Row, length_sample, load_rows
from predictor.errors import DatasetError
from predictor.prompt import Prompt
from predictor.text import head_and_tail

RECORDS = [
    {"prompt": "count to 3", "model": "demo", "output_tokens": 5, "finish_reason": "stop"},
    {"prompt": "count to 999", "model": "demo", "output_tokens": 512, "finish_reason": "length"},
]
ROWS = [Row(Prompt("count to 3", "demo"), 5), Row(Prompt("count to 999", "demo"), 512, capped=True)]
LMSYS = {
    "conversation_id": "c1",
    "model": "vicuna-13b",
    "conversation": [
        {"role": "user", "content": "Name a colour"},  # 13 characters
        {"role": "assistant", "content": "Deep blue"},  # 9
        {"role": "user", "content": "Another"},
        {"role": "assistant", "content": "Red it is"},
    ],
    "turn": 2,
    "language": "English",
}
LMSYS_ROWS = [
    Row(Prompt("Name a colour", "vicuna-13b"), 2, group="name a colour"),
    Row(Prompt("Another", "vicuna-13b", history_characters=22), 3, group="name a colour"),
]
SHAREGPT = {
    "id": "s1",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello you"},
    ],
}
SHAREGPT_ROWS = [Row(Prompt("Hi", system="Be brief."), 2, group="hi")]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def words(text: str) -> int:
    """Stands for the tokenizer of answers."""
    return len(text.split())


def conversation(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def row(prompt: str, output_tokens: int = 1) -> Row:
    return Row(Prompt(prompt), output_tokens)


# --- sources ----------------------------------------------------------------------------------------------------


def test_jsonl_gives_rows(tmp_path: Path) -> None:
    dataset = load_rows([write_jsonl(tmp_path / "a.jsonl", RECORDS)])
    assert dataset.rows == ROWS
    assert not dataset.bad


def test_compressed_jsonl_gives_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(tmp_path / "a.jsonl", RECORDS).read_bytes()))
    assert load_rows([path]).rows == ROWS


def test_a_json_array_gives_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RECORDS, indent=1))
    assert load_rows([tmp_path / "a.json"]).rows == ROWS


@pytest.mark.parametrize(
    ("text", "message"), [("[{", "line 1: the JSON array is damaged"), ("[" * 200_000, "recursion")]
)
def test_a_damaged_json_array_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DatasetError, match=rf"(?=.*cannot read .*a\.json)(?=.*{message})"):
        load_rows([tmp_path / "a.json"])


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    assert load_rows([tmp_path / "a.parquet"]).rows == ROWS


def test_a_hub_dataset_gives_the_same_rows_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "answers"  # load_dataset accepts a folder instead of a hub repository
    repository.mkdir()
    write_jsonl(repository / "train.jsonl", RECORDS)
    write_jsonl(repository / "test.jsonl", RECORDS[:1])
    assert load_rows([f"hub:{repository}"]).rows == ROWS
    assert load_rows([f"hub:{repository}:test"]).rows == ROWS[:1]


def test_a_hub_dataset_that_cannot_be_parsed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"prompt": "cut of')
    with pytest.raises(DatasetError, match="broken"):
        load_rows([f"hub:{tmp_path / 'broken'}"])


def test_several_sources_are_read_in_order(tmp_path: Path) -> None:
    sources = [write_jsonl(tmp_path / f"{i}.jsonl", [RECORDS[i]]) for i in (1, 0)]
    assert load_rows(sources).rows == [ROWS[1], ROWS[0]]


def test_columns_may_have_other_names_and_the_optional_ones_may_be_missing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "hello", "tokens": 3.0}])
    assert load_rows([path], Columns(prompt="question", output_tokens="tokens")).rows == [row("hello", 3)]


def test_bad_rows_are_counted_by_reason_and_the_others_kept(tmp_path: Path) -> None:
    bad = [
        [1, 2],
        {"output_tokens": 4},
        {"prompt": " \n", "output_tokens": 4},
        {"prompt": "a", "output_tokens": "four"},
        {"prompt": "a", "output_tokens": True},
        {"prompt": "a", "output_tokens": 0},
        {"prompt": "a", "output_tokens": 2.5},
        {"prompt": "a", "output_tokens": float("nan")},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [*bad, *RECORDS])
    path.write_bytes(path.read_bytes() + b'{"prompt": "cut off\n\xff\xfe\n\n')
    dataset = load_rows([path])
    assert dataset.rows == ROWS
    assert dataset.bad == {
        "a turn that is not a JSON object in 'the list'": 1,
        "not JSON": 1,
        "not UTF-8": 1,
        "no text in 'prompt'": 1,
        "empty text in 'prompt'": 1,
        "no number in 'output_tokens'": 2,
        "not a whole number above 0 in 'output_tokens'": 3,
    }


def test_an_endlessly_nested_line_is_a_bad_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    path.write_text(path.read_text() + "[" * 200_000)
    dataset = load_rows([path])
    assert dataset.rows == ROWS
    assert dataset.bad == {"not JSON": 1}
    assert dataset.bad_first == f"the first: {path}, line 3: not JSON"


@pytest.mark.parametrize("output_tokens", [10**400 - 1, 10_000_001, 1e8])
def test_an_impossible_length_is_a_bad_row(output_tokens: float, tmp_path: Path) -> None:
    records = [{"prompt": "a", "output_tokens": output_tokens}, {"prompt": "b", "output_tokens": 10_000_000}]
    dataset = load_rows([write_jsonl(tmp_path / "a.jsonl", records)])
    assert dataset.rows == [row("b", 10_000_000)]
    assert dataset.bad == {"not a plausible number in 'output_tokens': above 10000000": 1}


def test_maxima_may_be_as_large_as_unlimited_ones_are_written(tmp_path: Path) -> None:
    records = [{"prompt": "a", "output_tokens": 4, "max_tokens": number} for number in (2**63 - 1, 2**63)]
    dataset = load_rows([write_jsonl(tmp_path / "a.jsonl", records)])
    assert [row.output_tokens_max for row in dataset.rows] == [2**63 - 1]
    assert dataset.bad == {f"not a plausible number in 'max_tokens': above {2**63 - 1}": 1}


def test_half_a_surrogate_pair_becomes_a_question_mark_anywhere_in_a_row(tmp_path: Path) -> None:
    half = "a\ud800b"
    flat = {"prompt": half, "response": half, "model": half, "system": half, "stop": [half]}
    turns = [{"from": "human", "value": half}, {"from": "gpt", "value": half}]
    path = write_jsonl(tmp_path / "a.jsonl", [flat, {"conversations": turns}])
    dataset = load_rows([path], answer_tokens=lambda text: len(text.encode()))
    assert dataset.rows == [
        Row(Prompt("a?b", "a?b", system="a?b", stop=("a?b",)), 3),
        Row(Prompt("a?b"), 3, group="a?b"),
    ]


def test_without_a_usable_row_the_error_says_why(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "hello"}])
    with pytest.raises(DatasetError, match=r"no usable row in .*a\.jsonl \(1 x no text in 'prompt'; .*line 1"):
        load_rows([path])


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.json", "absent.parquet", "hub:./absent", "answers.csv"])
def test_a_source_that_cannot_be_read_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetError, match=name.removeprefix("hub:")):
        load_rows([name])


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.jsonl.gz"):
        (tmp_path / name).write_bytes(b"not what the name says")
        with pytest.raises(DatasetError, match=name):
            load_rows([tmp_path / name])


def test_a_compressed_file_with_a_damaged_middle_is_named(tmp_path: Path) -> None:
    compressed = gzip.compress("".join(json.dumps({"prompt": f"a {i}"}) for i in range(99)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(compressed[:20] + b"\xff" * 20 + compressed[40:])
    with pytest.raises(DatasetError, match=r"cannot read .*a\.jsonl\.gz"):
        load_rows([tmp_path / "a.jsonl.gz"])


# --- flat records -----------------------------------------------------------------------------------------------


def test_the_servers_record_is_a_flat_record(tmp_path: Path) -> None:
    record = {
        **{"prompt": "and now?", "system": "Be brief.", "history_characters": 70, "model": "m", "max_tokens": 512},
        **{"stop": ["###", "User:"], "temperature": 0.7, "output_tokens": 33, "finish_reason": "stop"},
    }
    prompt = Prompt("and now?", "m", system="Be brief.", history_characters=70, stop=("###", "User:"))
    assert load_rows([write_jsonl(tmp_path / "lengths.jsonl", [record])]).rows == [
        Row(prompt, 33, capped=False, output_tokens_max=512)
    ]


def test_optional_columns_may_be_null_or_empty(tmp_path: Path) -> None:
    columns = ["model", "finish_reason", "system", "history_characters", "max_tokens", "stop", "response"]
    record = {"prompt": "a", "output_tokens": 4, **dict.fromkeys(columns)}
    blank = {"prompt": "a", "output_tokens": 4, "model": "", "system": "", "history_characters": 0, "stop": ["", "\n"]}
    assert load_rows([write_jsonl(tmp_path / "a.jsonl", [record, blank])]).rows == [
        row("a", 4),
        Row(Prompt("a", stop=("\n",)), 4),
    ]


def test_a_single_stop_string_needs_no_list(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "output_tokens": 4, "stop": "END"}])
    assert load_rows([path]).rows[0].prompt.stop == ("END",)


@pytest.mark.parametrize(
    ("output_tokens", "max_tokens", "finish_reason", "capped"),
    [
        (7, None, "length", True),
        (7, 100, "length", True),  # for example by the end of the context
        (7, 8, "stop", False),
        (8, 8, "stop", True),  # ended there or was cut: the reason is not always given
        (9, 8, None, True),
        (7, None, None, False),
    ],
)
def test_an_answer_is_capped_if_marked_so_or_at_its_maximum(
    output_tokens: int, max_tokens: int | None, finish_reason: str | None, capped: bool, tmp_path: Path
) -> None:
    record = {"prompt": "a", "output_tokens": output_tokens, "max_tokens": max_tokens, "finish_reason": finish_reason}
    dataset = load_rows([write_jsonl(tmp_path / "a.jsonl", [record])])
    assert dataset.rows == [Row(Prompt("a"), output_tokens, capped, max_tokens)]


def test_the_tokens_of_a_response_are_counted_if_its_length_is_missing(tmp_path: Path) -> None:
    records = [
        {"prompt": "a", "response": "one two three"},
        {"prompt": "b", "response": "one two three", "output_tokens": 8},
        {"prompt": "c", "response": " "},
        {"prompt": "d", "response": 5},
    ]
    dataset = load_rows([write_jsonl(tmp_path / "a.jsonl", records)], answer_tokens=words)
    assert dataset.rows == [row("a", 3), row("b", 8)]
    assert dataset.bad == {"empty text in 'response'": 1, "no text in 'response'": 1}


def test_an_answer_without_a_single_known_token_counts_as_one(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "response": "\u2603"}])
    assert load_rows([path], answer_tokens=lambda text: 0).rows == [row("a", 1)]


def test_bad_values_of_optional_columns_are_counted_by_column(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"system": ["secret"]},
        {"history_characters": -1},
        {"history_characters": "secret"},
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"stop": {"secret": 1}},
        {"stop": ["secret", 1]},
    ]
    records = [{"prompt": "a", "output_tokens": 4, **fields} for fields in bad]
    dataset = load_rows([write_jsonl(tmp_path / "a.jsonl", [*records, *RECORDS])])
    assert dataset.rows == ROWS
    assert dataset.bad == {
        "no text in 'system'": 1,
        "not a whole number above -1 in 'history_characters'": 1,
        "no number in 'history_characters'": 1,
        "not a whole number above 0 in 'max_tokens'": 2,
        "neither a text nor a list of texts in 'stop'": 2,
    }


# --- conversations ----------------------------------------------------------------------------------------------


def test_an_lmsys_conversation_gives_a_row_for_each_answer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [LMSYS])
    assert load_rows([path], answer_tokens=words).rows == LMSYS_ROWS


def test_a_sharegpt_file_gives_rows(tmp_path: Path) -> None:
    (tmp_path / "sharegpt.json").write_text(json.dumps([SHAREGPT]))
    assert load_rows([tmp_path / "sharegpt.json"], answer_tokens=words).rows == SHAREGPT_ROWS


@pytest.mark.parametrize(
    ("asks", "answers"), [("human", "gpt"), ("user", "chatgpt"), ("Human", "bing"), ("user", "bard")]
)
def test_sharegpts_roles_have_many_names(asks: str, answers: str, tmp_path: Path) -> None:
    turns = [{"from": asks, "value": "Hi"}, {"from": answers, "value": "Hello you"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"conversations": turns}])
    assert load_rows([path], answer_tokens=words).rows == [Row(Prompt("Hi"), 2, group="hi")]


def test_openai_messages_give_rows_and_may_hold_parts(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "What is"},
        {"type": "image_url", "image_url": {}},
        {"type": "text", "text": "it?"},
    ]
    messages = [
        {"role": "developer", "content": "Look closely."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "A red fox"}]},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages, "model": "m"}])
    assert load_rows([path], answer_tokens=words).rows == [
        Row(Prompt("What is it?", "m", system="Look closely."), 3, group="what is it?")
    ]


def test_parquet_and_the_hub_give_conversations_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "chats").mkdir()
    pq.write_table(pa.Table.from_pylist([LMSYS]), tmp_path / "chats" / "train.parquet")
    assert load_rows([tmp_path / "chats" / "train.parquet"], answer_tokens=words).rows == LMSYS_ROWS
    assert load_rows([f"hub:{tmp_path / 'chats'}"], answer_tokens=words).rows == LMSYS_ROWS


def test_layouts_may_be_mixed_in_one_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [LMSYS, *RECORDS, SHAREGPT])
    assert load_rows([path], answer_tokens=words).rows == [*LMSYS_ROWS, *ROWS, *SHAREGPT_ROWS]


def test_a_record_with_a_measured_prompt_is_flat_and_with_a_mere_prompt_a_conversation(tmp_path: Path) -> None:
    records = [{**SHAREGPT, "prompt": "count to 3", "output_tokens": 5}, {**SHAREGPT, "prompt": "Hi", "response": None}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    assert load_rows([path], answer_tokens=words).rows == [row("count to 3", 5), *SHAREGPT_ROWS]


def test_only_an_answer_with_text_directly_after_a_question_or_a_tool_is_a_row(tmp_path: Path) -> None:
    record = conversation(
        ("assistant", "Welcome!"),  # answers no user turn; 8 characters of history
        ("user", "One"),  # 3; the next user turn is answered
        ("user", "Two"),  # 3
        ("assistant", "first answer"),  # 12
        ("assistant", "more of it"),  # 10; answers no user turn
        ("user", "Three"),  # 5
        ("assistant", " "),  # 1; has no text
        ("user", "Look it up"),  # 10
        ("tool", "42"),  # 2
        ("assistant", "it is 42"),  # 8; answers a tool
        ("system", "Be brief."),  # 9; not leading: history
        ("user", "Four"),
        ("assistant", "yes"),
        ("user", "Five"),
    )
    assert load_rows([write_jsonl(tmp_path / "a.jsonl", [record])], answer_tokens=words).rows == [
        Row(Prompt("Two", history_characters=11), 2, group="one"),
        Row(Prompt("Look it up", history_characters=44), 3, group="one"),
        Row(Prompt("Four", history_characters=71), 1, group="one"),
    ]


def test_the_group_is_normalised_and_skips_turns_without_text(tmp_path: Path) -> None:
    record = conversation(
        ("user", " "), ("user", "What  IS\nit"), ("assistant", "x"), ("user", "why"), ("assistant", "y")
    )
    dataset = load_rows([write_jsonl(tmp_path / "a.jsonl", [record])], answer_tokens=words)
    assert [row.group for row in dataset.rows] == ["what is it", "what is it"]


def test_bad_conversations_are_counted_by_reason_and_the_others_kept(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"messages": "secret"},
        {"conversation": []},
        conversation(("user", "secret")),
        conversation(("user", "secret"), ("assistant", "")),
        conversation(("system", "secret"), ("assistant", "secret")),
        {"conversations": [{"from": "human", "value": "secret"}, "secret"]},
        {"messages": [{"role": "user", "content": 5}, {"role": "assistant", "content": "secret"}]},
        {"messages": [{"role": "user", "content": "secret"}, {"role": "assistant", "content": None}]},  # calls a tool
        {"messages": [{"content": "secret"}, {"content": "secret"}]},
    ]
    dataset = load_rows([write_jsonl(tmp_path / "a.jsonl", [*bad, SHAREGPT])], answer_tokens=words)
    assert dataset.rows == SHAREGPT_ROWS
    assert dataset.bad == {
        "no list in 'messages'": 1,
        "no answered user turn in 'conversation'": 1,
        "no answered user turn in 'messages'": 5,
        "a turn that is not a JSON object in 'conversations'": 1,
        "a turn without text in 'messages'": 1,
    }


@pytest.mark.parametrize("record", [LMSYS, SHAREGPT, {"prompt": "a", "response": "b"}])
def test_uncountable_answers_are_an_error_that_names_the_missing_tokenizer(
    record: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match=r"must be counted.*--answer-tokenizer"):
        load_rows([write_jsonl(tmp_path / "a.jsonl", [*RECORDS, record])])


def test_without_a_usable_conversation_the_error_says_why(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [conversation(("user", "secret"))])
    with pytest.raises(DatasetError, match=r"no usable row in .*a\.jsonl \(1 x no answered user turn in 'messages'; "):
        load_rows([path])


# --- lengths and texts --------------------------------------------------------------------------------------------


def test_the_length_sample_is_sorted_bounded_and_keeps_the_quantiles() -> None:
    rows = [row("", length) for length in range(5000, 0, -1)]
    assert length_sample(rows[:3]) == [4998, 4999, 5000]
    assert length_sample(rows, size_max=5) == [501, 1501, 2501, 3501, 4501]


def test_a_long_text_keeps_its_two_ends() -> None:
    assert head_and_tail("abcdefgh", 8) == "abcdefgh"
    assert head_and_tail("abcdefgh", 5) == "ab gh"
    assert len(head_and_tail("x" * 10_000, 101)) == 101


def test_half_a_surrogate_pair_becomes_encodable() -> None:
    assert head_and_tail("a\ud800b", 10) == "a?b"
