"""Files to train on in the forms in which people publish them: each test writes a few lines as such a file has them."""

import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from predictor.dataset import Columns, Row, Rows, load_rows
from predictor.errors import DatasetError
from predictor.prompt import Prompt

ASK = {"role": "user", "content": "weather?"}  # 8 characters
CALL = {
    **{"role": "assistant", "content": None},
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}  # 5
SAY = {"role": "assistant", "content": "It is sunny."}
FLAT = [{"prompt": "one", "output_tokens": 5}, {"prompt": "two", "output_tokens": 7, "finish_reason": "length"}]
FLAT_ROWS = [Row(Prompt("one"), 5), Row(Prompt("two"), 7, capped=True)]

Load = Callable[..., Rows]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes a file of this name, bytes, a text or JSON lines of records, and loads it. Tokens are words."""

    def of(content: Any, name: str = "data.jsonl", columns: Columns | None = None) -> Rows:
        if isinstance(content, list):
            content = "".join(json.dumps(record) + "\n" for record in content)
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return load_rows([tmp_path / name], columns, answer_tokens=lambda text: len(text.split()))

    return of


def table(records: list[dict[str, Any]], delimiter: str = ",") -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, sorted({name for record in records for name in record}), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


# --- conversations with tools -------------------------------------------------------------------------------------


def test_the_answer_after_a_tools_turn_is_a_row_and_the_call_is_none(load: Load) -> None:
    rows = load([{"messages": [ASK, CALL, RESULT, SAY], "tools": [{"type": "function"}, {"type": "function"}]}]).rows
    assert rows == [Row(Prompt("weather?", history_characters=5, tools=2), 3, group="weather?")]


def test_answers_after_several_tools_and_later_questions_are_rows(load: Load) -> None:
    later = [{"role": "user", "content": "thanks"}, {"role": "assistant", "content": "You are welcome"}]
    rows = load([{"messages": [ASK, CALL, RESULT, RESULT, SAY, *later], "functions": [{"name": "look"}]}]).rows
    assert rows == [
        Row(Prompt("weather?", history_characters=10, tools=1), 3, group="weather?"),
        Row(Prompt("thanks", history_characters=30, tools=1), 3, group="weather?"),
    ]


@pytest.mark.parametrize("calls", [{"tool_calls": [{"id": "1"}]}, {"function_call": {"name": "look"}}, {"weight": 0}])
def test_a_text_beside_a_call_is_not_the_whole_answer(load: Load, calls: dict[str, Any]) -> None:
    dataset = load([{"messages": [ASK, {**SAY, **calls}]}, {"messages": [ASK, SAY]}])
    assert len(dataset.rows) == 1
    assert dataset.bad == {"no answered user turn in 'messages'": 1}


def test_sharegpts_calls_and_observations_are_turns_of_tools(load: Load) -> None:
    turns = [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": '{"name": "look"}'},  # 16
        {"from": "observation", "value": "sunny"},  # 5
        {"from": "gpt", "value": "It is sunny."},
    ]
    rows = load([{"conversations": turns, "system": "Be brief.", "tools": '[{"name": "look"}]'}]).rows
    assert rows == [Row(Prompt("weather?", system="Be brief.", history_characters=21, tools=1), 3, group="weather?")]


def test_anthropics_blocks_are_read(load: Load) -> None:
    turns = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Let me see"}, {"type": "tool_use", "name": "look"}],
        },
        {"role": "user", "content": [{"type": "tool_result", "content": "sunny"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "It is sunny."}]},
    ]
    rows = load([{"system": "Be brief.", "messages": turns}]).rows
    assert rows == [Row(Prompt("weather?", system="Be brief.", history_characters=10), 3, group="weather?")]


def test_geminis_contents_are_read(load: Load) -> None:
    record = {
        "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "weather?"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "look"}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "look"}}]},
            {"role": "model", "parts": [{"text": "It is sunny."}]},
        ],
    }
    assert load([record]).rows == [Row(Prompt("weather?", system="Be brief."), 3, group="weather?")]


def test_thoughts_count_as_part_of_the_answer_and_not_of_later_prompts(load: Load) -> None:
    turns = [ASK, {**SAY, "reasoning_content": "Let me think. "}, ASK, SAY]
    assert load([{"messages": turns}]).rows == [
        Row(Prompt("weather?"), 6, group="weather?"),
        Row(Prompt("weather?", history_characters=20), 3, group="weather?"),
    ]


# --- other spellings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": "Hi"}, {"role": "model", "content": "Hello you"}],
        [{"from": "user", "text": "Hi"}, {"from": "assistant", "text": "Hello you"}],
        [{"from": "Human ", "value": "Hi"}, {"from": "GPT", "value": "Hello you"}],
        [{"role": "prompter", "text": "Hi"}, {"role": "assistant", "text": "Hello you"}],
        [{"speaker": "human", "text": "Hi"}, {"speaker": "bot", "text": "Hello you"}],
    ],
)
def test_turns_have_many_spellings(load: Load, turns: list[dict[str, str]]) -> None:
    hello = [Row(Prompt("Hi"), 2, group="hi")]
    for column in ("messages", "conversations", "conversation", "items"):
        assert load([{column: turns}]).rows == hello
    assert load([turns, turns]).rows == hello * 2, "a list of turns on each line"
    assert load(json.dumps([turns, turns]), "lists.json").rows == hello * 2, "a list of lists of turns"


def test_an_arenas_record_has_two_conversations_of_two_models(load: Load) -> None:
    record = {"model_a": "m1", "model_b": "m2", "winner": "model_a", "conversation_a": [ASK, SAY]}
    record["conversation_b"] = [ASK, {"role": "assistant", "content": "Sunny"}]
    assert load([record]).rows == [
        Row(Prompt("weather?", "m1"), 3, group="weather?"),
        Row(Prompt("weather?", "m2"), 1, group="weather?"),
    ]


def test_two_columns_with_the_same_conversation_give_its_rows_once(load: Load) -> None:
    assert len(load([{"messages": [ASK, SAY], "conversations": [ASK, SAY]}]).rows) == 1


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "Count", "completion": "1 2 3"}, "Count"),
        ({"prompt": "Count", "response": "1 2 3", "completion": "other"}, "Count"),
        ({"instruction": "Count", "input": "", "output": "1 2 3"}, "Count"),
        ({"instruction": "Count", "input": "to 3", "output": "1 2 3"}, "Count\nto 3"),
        ({"instruction": "Count", "context": "to 3", "response": "1 2 3", "category": "c"}, "Count\nto 3"),
        ({"question": "Count", "answer": "1 2 3"}, "Count"),
        ({"query": "Count", "response": "1 2 3"}, "Count"),
        ({"input": "Count", "output": "1 2 3"}, "Count"),
        ({"inputs": "Count", "targets": "1 2 3"}, "Count"),
    ],
)
def test_prompts_and_answers_are_known_by_the_usual_names(load: Load, record: dict[str, Any], prompt: str) -> None:
    assert load([record]).rows == [Row(Prompt(prompt), 3)]


def test_the_system_prompt_and_the_history_beside_a_prompt_are_read(load: Load) -> None:
    orca = {"system_prompt": "Be brief.", "question": "Count", "response": "1 2 3"}
    factory = {
        "system": "Be brief.",
        "instruction": "Count",
        "output": "1 2 3",
        "history": [["Hi", "Hello"], ["a", "b"]],
    }
    assert load([orca, factory]).rows == [
        Row(Prompt("Count", system="Be brief."), 3),
        Row(Prompt("Count", system="Be brief.", history_characters=9), 3),
    ]


def test_prompt_and_completion_may_be_messages(load: Load) -> None:
    earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    records = [
        {"prompt": [ASK], "completion": [SAY]},
        {"prompt": [*earlier, ASK], "completion": [SAY]},
        {"prompt": [*earlier, ASK], "completion": "It is sunny."},
        {"prompt": [*earlier, ASK], "output_tokens": 12},
        {"prompt": "weather?", "completion": [CALL, RESULT, SAY]},
    ]
    assert load(records).rows == [
        Row(Prompt("weather?"), 3, group="weather?"),
        Row(Prompt("weather?", history_characters=7), 3, group="hi"),  # "Hello" is no answer of this record
        Row(Prompt("weather?", history_characters=7), 3, group="hi"),
        Row(Prompt("weather?", history_characters=7), 12, group="hi"),
        Row(Prompt("weather?", history_characters=5), 3, group="weather?"),
    ]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"question": "q", "answer": "4", "output": "long"},
            "the answer could be in 'output' or 'answer': say it with",
        ),
        (
            {"question": "q", "query": "q", "output": "long"},
            "the prompt could be in 'question' or 'query': say it with",
        ),
        ({"prompt": "p", "chosen": "yes", "rejected": "no"}, "no number in 'output_tokens'"),
        ({"prompt": "p", "response": ""}, "empty text in 'response'"),
        ({"instruction": "p", "input": "", "output": ""}, "empty text in 'output'"),
        ({"prompt": "", "output_tokens": 4}, "empty text in 'prompt'"),
        ({"prompt": "p", "response": ["a", "b"]}, "a turn that is not a JSON object in 'response'"),
        ({"prompt": [SAY], "completion": "c"}, "no user turn in 'prompt'"),
        ({"text": "<s>[INST] Hi [/INST] Hello</s>"}, "no text in 'prompt'"),
        ({"prompt": "p", "output_tokens": "1_0"}, "no number in 'output_tokens'"),
        ({"messages": "[{'role': 'user', 'content': 'as Python writes it'}]"}, "no list in 'messages'"),
    ],
)
def test_what_may_mean_two_things_gives_no_row(load: Load, record: dict[str, Any], reason: str) -> None:
    dataset = load([*FLAT, record])
    assert dataset.rows == FLAT_ROWS
    assert [reason in text for text in dataset.bad] == [True]
    assert f"data.jsonl, line 3: {reason}" in dataset.bad_first


def test_columns_that_are_named_are_the_only_ones(load: Load) -> None:
    columns = Columns(prompt="q", response="a")
    dataset = load([{"q": "x", "a": "1 2"}, {"prompt": "p", "completion": "c"}], columns=columns)
    assert dataset.rows == [Row(Prompt("x"), 2)]
    assert dataset.bad == {"no text in 'q'": 1}


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.ndjson", "d.txt", "d.jl", "d", "d.parquet"])
def test_json_lines_may_have_any_name(load: Load, name: str) -> None:
    assert load(FLAT, name).rows == FLAT_ROWS


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(json.dumps(FLAT), id="an array on one line"),
        pytest.param(json.dumps(FLAT, indent=2), id="an array over lines"),
        pytest.param("[\n" + ",\n".join(map(json.dumps, FLAT)) + "\n]\n", id="an array with a record on each line"),
        pytest.param("\n".join(json.dumps(record, indent=1) for record in FLAT), id="objects over lines, as of jq"),
        pytest.param("\n\n".join(map(json.dumps, FLAT)) + "\n \n", id="blank lines"),
        pytest.param(json.dumps({"version": "1.1", "data": FLAT}), id="an array in an object"),
        pytest.param(
            json.dumps({"type": "text2text", "instances": FLAT}, indent=1), id="an array in an object over lines"
        ),
        pytest.param("\r\n".join(map(json.dumps, FLAT)), id="line ends of Windows"),
        pytest.param(table(FLAT), id="CSV"),
        pytest.param(table(FLAT, ";"), id="CSV with semicolons"),
        pytest.param(table(FLAT, "\t"), id="TSV"),
    ],
)
@pytest.mark.parametrize(
    "pack",
    [
        pytest.param(lambda data: data, id="plain"),
        pytest.param(gzip.compress, id="gzip"),
        pytest.param(lzma.compress, id="xz"),
        pytest.param(lambda data: b"\xef\xbb\xbf" + data, id="byte order mark"),
        pytest.param(lambda data: data.decode().encode("utf-16"), id="UTF-16"),
    ],
)
def test_the_content_says_how_a_file_is_read(load: Load, content: str, pack: Callable[[bytes], bytes]) -> None:
    assert load(pack(content.encode()), "data.json.gz").rows == FLAT_ROWS


def test_a_table_holds_texts_with_commas_quotes_and_line_breaks_and_turns_as_json(load: Load) -> None:
    records = [{"prompt": 'Say "a, b"\nand c', "output_tokens": 5, "max_tokens": ""}]
    assert load(table(records), "a.csv").rows == [Row(Prompt('Say "a, b"\nand c'), 5)]
    assert load(table([{"id": 7, "messages": json.dumps([ASK, SAY])}]), "b.csv").rows == [
        Row(Prompt("weather?"), 3, group="weather?")
    ]


def test_a_prompt_of_a_table_may_be_long(load: Load) -> None:
    assert len(load(table([{"prompt": "x" * 300_000, "output_tokens": 5}])).rows[0].prompt.text) == 300_000


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"prompt": "one", "output_tokens": 5}\n\n{"prompt": "tw', 3),
        ('[\n{"prompt": "one", "output_tokens": 5},\n\n{"prompt": "two"}\n]', 4),
        ('prompt,output_tokens\n"on\ne",5\n\ntwo\n', 5),
        ('{"prompt": "cut\n{"prompt": "one", "output_tokens": 5}\n', 1),
    ],
)
def test_the_first_unusable_record_is_named_with_its_line(load: Load, content: str, line: int) -> None:
    dataset = load(content)
    assert len(dataset.rows) == 1
    assert f"data.jsonl, line {line}: " in dataset.bad_first


def test_output_tokens_may_be_in_another_column_of_a_file_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "answers.csv").write_text("prompt,vicuna\none,5\n")
    assert load_rows([f"{tmp_path}/answers.csv:vicuna"]).rows == [Row(Prompt("one"), 5)]


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"text": "Hi"}, '"prompt": "Count to 3", "output_tokens": 5'),
        ({"data": [{"prompt": "Hi"}], "train": [{"prompt": "Hi"}]}, '"prompt": "Count to 3", "output_tokens": 5'),
        ({"messages": [ASK]}, '"messages": [{"role": "user"'),
        (ASK, '"messages": [{"role": "user"'),
        ({"from": "human", "value": "Hi"}, '"conversations": [{"from": "human"'),
        ({"instruction": "Hi", "label": 1}, '"instruction": "Count"'),
        ({"question": "Hi", "choices": ["a"]}, '"question": "What is 1 + 2?"'),
    ],
)
def test_without_a_usable_row_the_nearest_form_is_shown(load: Load, record: dict[str, Any], form: str) -> None:
    with pytest.raises(
        DatasetError, match=r"no usable row in .*line 1: .*It has .*nearest form that can be read: "
    ) as error:
        load([record])
    assert form in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04", "a ZIP archive"),
        (b"<!DOCTYPE html>", "download the raw file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b'prompt,output_tokens\n"one,5\n', "line 2: unexpected end of data"),
        (b"\x00\x01\x02", "not a text file"),
    ],
)
def test_a_file_that_is_no_data_is_named_with_what_helps(load: Load, content: bytes, message: str) -> None:
    with pytest.raises(DatasetError, match=rf"cannot read .*data\.jsonl: .*{message}"):
        load(content)
