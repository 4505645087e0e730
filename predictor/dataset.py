"""Files and hub datasets -> rows (a prompt and the length of its answer), and their split by prompt."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from predictor.errors import DatasetError
from predictor.prompt import Prompt
from predictor.records import UNREADABLE, Malformed, records
from predictor.text import normalised
from predictor.turns import BadRecord, Turn, answers_of, asked, encodable, group_of, text_of, turns_of

TURNS_COLUMNS = {
    **dict.fromkeys(("messages", "conversation"), "model"),  # of OpenAI, of LMSYS-Chat-1M
    **dict.fromkeys(("conversations", "items", "contents"), "model"),  # of ShareGPT, twice, and of Gemini
    **{"conversation_a": "model_a", "conversation_b": "model_b"},  # of the chatbot arena
}
"""Columns with the turns of a conversation, and the column with the name of the model that answers in them."""
PROMPTS = ("instruction", "question", "query", "inputs", "input")
"""Columns that hold the prompt where there is no column `prompt`."""
PROMPT_SUPPLEMENTS = ("input", "context")
"""Columns of Alpaca and of Dolly, whose text belongs to the prompt in `instruction`."""
RESPONSES = ("completion", "output", "answer", "targets")
"""Columns that hold the answer where there is no column `response`."""
SYSTEMS = ("system", "system_prompt", "systemInstruction")
EXAMPLES = {
    ("prompt", "output_tokens"): '{"prompt": "Count to 3", "output_tokens": 5}',
    ("prompt", "response"): '{"prompt": "Count to 3", "response": "1, 2, 3"}',
    ("prompt", "completion"): '{"prompt": "Count to 3", "completion": "1, 2, 3"}',
    ("instruction", "input", "output"): '{"instruction": "Count", "input": "to 3", "output": "1, 2, 3"}',
    ("question", "answer"): '{"question": "What is 1 + 2?", "answer": "3"}',
    (
        "messages",
        "role",
        "content",
    ): '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}',
    (
        "conversations",
        "from",
        "value",
    ): '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}',
}
"""Lines in the forms that can be read, by their columns, for messages."""
GLUE_WORDS_MAX = 3
GLUE_CHARACTERS_MAX = 20
"""Texts of at most so many words and characters, such as "continue" or "thanks", occur in unrelated conversations.
There are two limits because a paragraph of Chinese is one word."""
OUTPUT_TOKENS_MAX = 10_000_000
"""No answer is as long: a column with larger numbers holds something else, or is damaged."""
NUMBER_CHARACTERS_MAX = 20
NAME_CHARACTERS_MAX, NAMES_MAX = 30, 12  # of columns, in messages
NUMBER_MAX = 2**63 - 1
"""Limit of the other columns: "no limit" is often a very large max_tokens."""


@dataclass(frozen=True, slots=True)
class Row:
    """One observed answer.

    output_tokens      at least 1
    capped             the answer was cut: its full length is at least output_tokens (right-censored)
    output_tokens_max  max_tokens of the request; None when unknown
    group              rows of one group are on one side of a split: the normalised first user text of their
                       conversation; "" for a single row, whose group is its own text
    """

    prompt: Prompt
    output_tokens: int
    capped: bool = False
    output_tokens_max: int | None = None
    group: str = ""


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names of flat records. The prompt, and either output_tokens or response, are required.

    PROMPTS and RESPONSES are further names of the prompt and the response, as long as these have their own names here.
    Of a conversation only the column `model` is read.
    """

    prompt: str = "prompt"
    output_tokens: str = "output_tokens"
    model: str = "model"
    finish_reason: str = "finish_reason"
    system: str = "system"
    history_characters: str = "history_characters"
    max_tokens: str = "max_tokens"
    stop: str = "stop"
    response: str = "response"


@dataclass(slots=True)
class Rows:
    """The usable rows, and the number of unusable records by reason.

    bad_first  place and reason of the first unusable record; "" without one
    """

    rows: list[Row] = field(default_factory=list)
    bad: Counter[str] = field(default_factory=Counter)
    bad_first: str = ""

    def unusable(self) -> str:
        """The unusable records in words; "" without one."""
        if not self.bad:
            return ""
        return f"{', '.join(f'{count} x {reason}' for reason, count in self.bad.most_common())}; {self.bad_first}"


@dataclass(frozen=True, slots=True)
class Splits:
    """Three sets of rows that share no prompt. Training choices may use validation, never held_out."""

    train: list[Row]
    validation: list[Row]
    held_out: list[Row]


def load_rows(
    sources: Sequence[str | Path],
    columns: Columns | None = None,
    answer_tokens: Callable[[str], int] | None = None,
) -> Rows:
    """Read every source, in order; count records without a usable row by reason.

    A source is a file of JSON lines, a JSON array, CSV, TSV or Parquet (predictor/records.py), plain or compressed, or
    `hub:NAME[:SPLIT]` (default split "train").
    FILE:COLUMN is a file whose output tokens are in that column, in place of columns.output_tokens.
    A record is flat, one row with the columns of `columns`, or a conversation, a list of turns by itself or in one of
    TURNS_COLUMNS: a row for each assistant turn whose text answers a user's or a tool's turn. A prompt or a response
    may be a list of turns, too. A record that is both counts as flat. Where two columns could be the prompt, or the
    answer, the record is not used.
    answer_tokens : counts the tokens of an answer's text, for records without a count.
    Raises DatasetError when a source cannot be read, when an answer must be counted and `answer_tokens` is missing, or
    when no row of all sources is usable.
    """
    loaded = Rows()
    unknown: Any = None
    for source in sources:
        name, columns_of = _file_and_columns(str(source), columns or Columns())
        for number, record in _records(name):
            try:
                loaded.rows += _parse(record, columns_of, answer_tokens or _cannot_count)
            except BadRecord as bad:
                loaded.bad[str(bad)] += 1
                unknown = unknown or record
                loaded.bad_first = loaded.bad_first or f"the first: {name}, {_unit(name)} {number}: {bad}"
    if not loaded.rows:
        message = f"no usable row in {', '.join(map(str, sources))} ({loaded.unusable() or 'no rows at all'})"
        raise DatasetError(f"{message}. {_nearest_form(unknown)}")
    return loaded


def split_rows(rows: Iterable[Row], seed: int, validation_share: float = 0.1, held_out_share: float = 0.1) -> Splits:
    """Split by prompt: all rows of a prompt, of its near duplicates and of its conversation are on one side.

    A row's prompt is its group. The row's own text is tied to the group unless the text is glue (GLUE_WORDS_MAX):
    otherwise one "continue" would tie all conversations together. Near duplicates: see predictor/splitting.py.
    The shares are expected, not exact: the side of a cluster of tied prompts depends only on the seed and on the first
    of its normalised prompts, in sorted order. So the order of the rows does not matter, and a new row moves only
    prompts that are tied to it. Raises DatasetError when a side is empty.
    """
    from predictor.splitting import representatives  # takes a second: not imported for --help

    rows = list(rows)
    groups = [normalised(row.group or row.prompt.text) for row in rows]
    ties = {tie for row, group in zip(rows, groups, strict=True) if (tie := _tie(row, group)) is not None}
    prompts = representatives(set(groups), ties)
    splits = Splits([], [], [])
    for row, group in zip(rows, groups, strict=True):
        place = _uniform(prompts[group], seed)
        if place < held_out_share:
            splits.held_out.append(row)
        elif place < held_out_share + validation_share:
            splits.validation.append(row)
        else:
            splits.train.append(row)
    if not (splits.train and splits.validation and splits.held_out):
        raise DatasetError("too few different prompts to split them into training, validation and held-out")
    return splits


def length_sample(rows: Sequence[Row], size_max: int = 1000) -> list[int]:
    """A sorted sample of the rows' output tokens: all of them, or `size_max` evenly spaced quantiles."""
    lengths = sorted(row.output_tokens for row in rows)
    if len(lengths) <= size_max:
        return lengths
    return [lengths[int((i + 0.5) / size_max * len(lengths))] for i in range(size_max)]


def _file_and_columns(source: str, columns: Columns) -> tuple[str, Columns]:
    name, _, column = source.rpartition(":")
    if source.startswith("hub:") or Path(source).is_file() or not Path(name).is_file():
        return source, columns
    return name, replace(columns, output_tokens=column)


def _records(source: str) -> Iterator[tuple[int, Any]]:
    """(number, record) of one source: mappings, or other values where the source is wrong."""
    if not source.startswith("hub:"):
        return records(source)
    return enumerate(_hub_records(source.removeprefix("hub:")), start=1)


def _unit(name: str) -> str:
    return "row" if name.startswith("hub:") or name.endswith(".parquet") else "line"


def _hub_records(name_and_split: str) -> Iterator[Any]:
    import datasets

    name, _, split = name_and_split.partition(":")
    try:
        yield from datasets.load_dataset(name, split=split or "train")
    except (datasets.exceptions.DatasetsError, *UNREADABLE) as error:  # such as a file that cannot be parsed
        raise DatasetError(f"cannot read {name}: {error}") from error


def _nearest_form(record: Any) -> str:
    """What can be read that is like the record, for messages."""
    has = set(record) if isinstance(record, Mapping) else set()
    nearest = max(EXAMPLES, key=lambda columns: len(has.intersection(columns)))
    names = [str(name)[:NAME_CHARACTERS_MAX] for name in has]
    columns = f"It has {', '.join(sorted(names)[:NAMES_MAX])}. " if has else ""
    return f"{columns}The nearest form that can be read: {EXAMPLES[nearest]}"


def _cannot_count(answer: str) -> int:
    raise DatasetError(
        "the tokens of answer texts must be counted: give the tokenizer of the model that wrote the answers "
        "(--answer-tokenizer), or name the column with the number of tokens"
    )


def _parse(record: Any, columns: Columns, answer_tokens: Callable[[str], int]) -> list[Row]:
    """The record's rows, at least one; raises BadRecord."""
    if isinstance(record, Malformed):
        raise BadRecord(record.reason)
    if isinstance(record, list):
        return _conversation_rows(turns_of(record, "the list"), "the list", Prompt(""), answer_tokens)
    if not isinstance(record, Mapping):
        raise BadRecord("not a JSON object")
    empty = {column for column, value in record.items() if value == ""}  # tables have such cells for what is missing
    record = {column: value for column, value in record.items() if value is not None and column not in empty}
    prompt, response = _prompt_column(record, columns), _response_column(record, columns)
    is_flat = prompt in record and (columns.output_tokens in record or response in record)
    if is_flat or record.keys().isdisjoint(TURNS_COLUMNS):
        if isinstance(record.get(response), list) and columns.output_tokens not in record:
            return _dialogue_rows(record, prompt, response, columns, answer_tokens)
        if not is_flat:
            _check_filled(empty, columns)
        return [_flat_row(record, prompt, response, columns, answer_tokens)]
    found = [column for column in TURNS_COLUMNS if column in record]
    rows = []
    for column in found[:1] if TURNS_COLUMNS[found[0]] == "model" else found:
        model = columns.model if TURNS_COLUMNS[column] == "model" else TURNS_COLUMNS[column]
        turns = [*_system_turns(record, columns), *turns_of(record[column], column)]
        rows += _conversation_rows(turns, column, _around(record, model), answer_tokens)
    return rows


def _check_filled(empty: set[str], columns: Columns) -> None:
    """Raises BadRecord when the prompt or the answer of a record is empty."""
    names = (columns.prompt, columns.response, *PROMPTS, *RESPONSES)
    if name := next((name for name in names if name in empty and name not in PROMPT_SUPPLEMENTS), None):
        raise BadRecord(f"empty text in {name!r}")


def _prompt_column(record: Mapping[str, Any], columns: Columns) -> str:
    if columns.prompt in record or columns.prompt != "prompt":
        return columns.prompt
    names = [name for name in PROMPTS if name in record]
    if names[:1] == ["instruction"]:
        names = [name for name in names if name not in PROMPT_SUPPLEMENTS]
    return _only(names, "prompt", "--prompt-column") or columns.prompt


def _response_column(record: Mapping[str, Any], columns: Columns) -> str:
    if columns.response in record or columns.output_tokens in record or columns.response != "response":
        return columns.response
    return _only([name for name in RESPONSES if name in record], "answer", "--response-column") or columns.response


def _only(names: list[str], what: str, option: str) -> str:
    if len(names) > 1:
        raise BadRecord(f"the {what} could be in {' or '.join(map(repr, names))}: say it with {option}")
    return names[0] if names else ""


def _flat_row(
    record: Mapping[str, Any], prompt: str, response: str, columns: Columns, answer_tokens: Callable[[str], int]
) -> Row:
    request, group = _request(record, prompt, columns)
    if columns.output_tokens not in record and response in record:
        output_tokens = _counted(_filled(_text(record, response), response), answer_tokens)
    else:
        output_tokens = _whole(record, columns.output_tokens, 1, OUTPUT_TOKENS_MAX)
    output_tokens_max = _optional_whole(record, columns.max_tokens, 1)
    reached = output_tokens_max is not None and output_tokens >= output_tokens_max
    capped = reached or record.get(columns.finish_reason) == "length"
    return Row(request, output_tokens, capped, output_tokens_max, group)


def _request(record: Mapping[str, Any], column: str, columns: Columns) -> tuple[Prompt, str]:
    """The prompt of a flat record, which is a text or a list of turns, and the group of its row."""
    if isinstance(record.get(column), list):
        turns = [*_system_turns(record, columns), *turns_of(record[column], column)]
        if not any(turn.role == "user" and turn.text.strip() for turn in turns):
            raise BadRecord(f"no user turn in {column!r}")
        return asked(turns, _around(record, columns.model)), group_of(turns)
    texts = [_filled(_text(record, column), column)]
    if column == "instruction":
        texts += [_text(record, name) for name in PROMPT_SUPPLEMENTS if name in record]
    prompt = Prompt(
        text="\n".join(texts),
        model=_model(record, columns.model),
        system=_system(record, columns),
        history_characters=_optional_whole(record, columns.history_characters, 0) or _history_characters(record),
        stop=_stop(record.get(columns.stop), columns.stop),
    )
    return prompt, ""


def _dialogue_rows(
    record: Mapping[str, Any], prompt: str, response: str, columns: Columns, answer_tokens: Callable[[str], int]
) -> list[Row]:
    """A prompt, a text or turns, whose response is turns. What the assistant says in the prompt is no answer here."""
    question = record.get(prompt)
    before = [{"role": "user", "content": question}] if isinstance(question, str) else question
    asked_turns = [*_system_turns(record, columns), *turns_of(before, prompt)]
    turns = [*asked_turns, *turns_of(record[response], response)]
    return _conversation_rows(turns, response, _around(record, columns.model), answer_tokens, len(asked_turns))


def _conversation_rows(
    turns: list[Turn], column: str, around: Prompt, answer_tokens: Callable[[str], int], first: int = 0
) -> list[Row]:
    """around : what the requests have in common.  first : place of the first turn that may be an answer"""
    group = group_of(turns)
    rows = [
        Row(prompt, _counted(answer, answer_tokens), group=group) for prompt, answer in answers_of(turns, around, first)
    ]
    if not rows:
        raise BadRecord(f"no answered user turn in {column!r}")
    return rows


def _around(record: Mapping[str, Any], model_column: str) -> Prompt:
    """The model and the number of tools of a conversation."""
    tools = record.get("tools", record.get("functions"))
    if isinstance(tools, str):  # JSON in a text, as in tables
        with suppress(ValueError, RecursionError):
            tools = json.loads(tools)
    return Prompt("", _model(record, model_column), tools=len(tools) if isinstance(tools, list) else 0)


def _system(record: Mapping[str, Any], columns: Columns) -> str:
    column = next((name for name in (columns.system, *SYSTEMS) if name in record), None)
    if column is None:
        return ""
    return text_of(record[column], column) if isinstance(record[column], Mapping) else _text(record, column)


def _system_turns(record: Mapping[str, Any], columns: Columns) -> list[Turn]:
    """The system prompt beside a conversation, as its first turn."""
    text = _system(record, columns)
    return [Turn("system", text, "")] if text else []


def _history_characters(record: Mapping[str, Any]) -> int:
    """Characters of the earlier questions and answers in LLaMA-Factory's `history`, a list of pairs."""
    history = record.get("history")
    pairs = [pair for pair in history if isinstance(pair, list)] if isinstance(history, list) else []
    return sum(len(text) for pair in pairs for text in pair if isinstance(text, str))


def _model(record: Mapping[str, Any], column: str) -> str:
    return encodable(str(record.get(column) or ""))


def _text(record: Mapping[str, Any], column: str) -> str:
    text = record.get(column)
    if not isinstance(text, str):
        raise BadRecord(f"no text in {column!r}")
    return encodable(text)


def _filled(text: str, column: str) -> str:
    if not text.strip():
        raise BadRecord(f"empty text in {column!r}")
    return text


def _whole(record: Mapping[str, Any], column: str, least: int, most: int = NUMBER_MAX) -> int:
    number = _number(record.get(column))
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise BadRecord(f"no number in {column!r}")
    if (isinstance(number, float) and not number.is_integer()) or number < least:
        raise BadRecord(f"not a whole number above {least - 1} in {column!r}")
    if number > most:
        raise BadRecord(f"not a plausible number in {column!r}: above {most}")
    return int(number)


def _number(value: Any) -> Any:
    """The number in a cell of a table; other values as they are."""
    if isinstance(value, str) and len(value) <= NUMBER_CHARACTERS_MAX and "_" not in value:
        with suppress(ValueError):
            return float(value) if "." in value else int(value)
    return value


def _optional_whole(record: Mapping[str, Any], column: str, least: int) -> int | None:
    return None if record.get(column) is None else _whole(record, column, least)


def _stop(stop: Any, column: str) -> tuple[str, ...]:
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRecord(f"neither a text nor a list of texts in {column!r}")
    return tuple(encodable(text) for text in texts if text)


def _counted(answer: str, answer_tokens: Callable[[str], int]) -> int:
    return max(1, answer_tokens(answer))  # a tokenizer may drop all characters of a text


def _tie(row: Row, group: str) -> tuple[str, str] | None:
    """The row's group and its own text; None if they are the same or the text is glue."""
    text = normalised(row.prompt.text)
    is_glue = len(text.split()) <= GLUE_WORDS_MAX and len(text) <= GLUE_CHARACTERS_MAX
    return None if text == group or is_glue else (group, text)


def _uniform(prompt: str, seed: int) -> float:
    """A number in [0, 1) that depends on the seed and on the normalised prompt only."""
    text = prompt.encode("utf-8", "replace")
    digest = hashlib.blake2b(text, digest_size=8, salt=str(seed).encode()[:16]).digest()
    return int.from_bytes(digest) / 2**64
