"""Files and hub datasets -> rows (a prompt and the length of its answer), and their split by prompt."""

import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from predictor.errors import DatasetError
from predictor.prompt import Prompt
from predictor.text import normalised

TURNS_COLUMNS = ("messages", "conversation", "conversations")  # of OpenAI, of LMSYS-Chat-1M, of ShareGPT
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
}
GLUE_WORDS_MAX = 3
GLUE_CHARACTERS_MAX = 20
"""Texts of at most so many words and characters, such as "continue" or "thanks", occur in unrelated conversations.
There are two limits because a paragraph of Chinese is one word."""
OUTPUT_TOKENS_MAX = 10_000_000
"""No answer is as long: a column with larger numbers holds something else, or is damaged."""
SOURCE_AND_COLUMN = re.compile(r"^(.+\.(?:jsonl|jsonl\.gz|json|parquet)):([^/]+)$")
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
    """The usable rows, and the number of unusable records by reason."""

    rows: list[Row] = field(default_factory=list)
    bad: Counter[str] = field(default_factory=Counter)


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

    A source is a .jsonl, .jsonl.gz, .json (one array) or .parquet file, or `hub:NAME[:SPLIT]` (default split "train").
    FILE:COLUMN is a file whose output tokens are in that column, in place of columns.output_tokens.
    A record is flat, one row with the columns of `columns`, or a conversation in one of TURNS_COLUMNS: a row for each
    assistant turn that has text and answers a user turn. A record that is both counts as flat.
    answer_tokens : counts the tokens of an answer's text, for records without a count.
    Raises DatasetError when a source cannot be read, when an answer must be counted and `answer_tokens` is missing, or
    when no row of all sources is usable.
    """
    loaded = Rows()
    for source in sources:
        name, columns_of = _file_and_columns(str(source), columns or Columns())
        for record in _records(name):
            try:
                loaded.rows += _parse(record, columns_of, answer_tokens or _cannot_count)
            except _BadRecord as bad:
                loaded.bad[str(bad)] += 1
    if not loaded.rows:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in loaded.bad.most_common())
        raise DatasetError(f"no usable row in {', '.join(map(str, sources))} ({reasons or 'no rows at all'})")
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
    match = SOURCE_AND_COLUMN.match(source)
    return (source, columns) if match is None else (match[1], replace(columns, output_tokens=match[2]))


def _records(source: str) -> Iterator[Any]:
    """The records of one source: mappings, or other values where the source is wrong."""
    try:
        if source.startswith("hub:"):
            yield from _hub_records(source.removeprefix("hub:"))
        elif source.endswith(".parquet"):
            yield from _parquet_records(source)
        elif source.endswith((".jsonl", ".jsonl.gz")):
            yield from _json_lines(source)
        elif source.endswith(".json"):
            yield from _json_array(source)
        else:
            raise DatasetError(f"{source}: expected .jsonl, .jsonl.gz, .json, .parquet or hub:NAME[:SPLIT]")
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:  # bases of pyarrow's errors too
        raise DatasetError(f"cannot read {source}: {error}") from error


def _json_lines(path: str) -> Iterator[Any]:
    with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as lines:
        for line in lines:
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested without end
                    yield None


def _json_array(path: str) -> list[Any]:
    records = json.loads(Path(path).read_bytes())
    if not isinstance(records, list):
        raise DatasetError(f"{path}: expected one array of records; one record per line is .jsonl")
    return records


def _parquet_records(path: str) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def _hub_records(name_and_split: str) -> Iterator[Any]:
    import datasets

    name, _, split = name_and_split.partition(":")
    try:
        yield from datasets.load_dataset(name, split=split or "train")
    except datasets.exceptions.DatasetsError as error:  # such as a file that cannot be parsed
        raise DatasetError(f"cannot read {name}: {error}") from error


class _BadRecord(Exception):
    """The reason why a record cannot be used, for the counts of load_rows. Names the column, never quotes data."""


def _cannot_count(answer: str) -> int:
    raise DatasetError(
        "the tokens of answer texts must be counted: give the tokenizer of the model that wrote the answers "
        "(--answer-tokenizer), or name the column with the number of tokens"
    )


def _parse(record: Any, columns: Columns, answer_tokens: Callable[[str], int]) -> list[Row]:
    """The record's rows, at least one; raises _BadRecord."""
    if not isinstance(record, Mapping):
        raise _BadRecord("not a JSON object")
    has = {column for column, value in record.items() if value is not None}
    turns_column = next((column for column in TURNS_COLUMNS if column in has), None)
    is_flat = columns.prompt in has and not has.isdisjoint((columns.output_tokens, columns.response))
    if turns_column is None or is_flat:
        return [_flat_row(record, columns, answer_tokens)]
    return _conversation_rows(record[turns_column], turns_column, _model(record, columns), answer_tokens)


def _flat_row(record: Mapping[str, Any], columns: Columns, answer_tokens: Callable[[str], int]) -> Row:
    prompt = Prompt(
        text=_filled(_text(record, columns.prompt), columns.prompt),
        model=_model(record, columns),
        system="" if record.get(columns.system) is None else _text(record, columns.system),
        history_characters=_optional_whole(record, columns.history_characters, 0) or 0,
        stop=_stop(record.get(columns.stop), columns.stop),
    )
    if record.get(columns.output_tokens) is None and isinstance(record.get(columns.response), str):
        output_tokens = _counted(_filled(_text(record, columns.response), columns.response), answer_tokens)
    else:
        output_tokens = _whole(record, columns.output_tokens, 1, OUTPUT_TOKENS_MAX)
    output_tokens_max = _optional_whole(record, columns.max_tokens, 1)
    reached = output_tokens_max is not None and output_tokens >= output_tokens_max
    return Row(prompt, output_tokens, reached or record.get(columns.finish_reason) == "length", output_tokens_max)


def _conversation_rows(turns: Any, column: str, model: str, answer_tokens: Callable[[str], int]) -> list[Row]:
    if not isinstance(turns, list):
        raise _BadRecord(f"no list in {column!r}")
    texts = [_turn(turn, column) for turn in turns]
    system = texts.pop(0)[1] if texts and texts[0][0] == "system" else ""
    group = normalised(next((text for role, text in texts if role == "user" and text.strip()), ""))
    rows, history_characters = [], 0
    for (role, text), (next_role, answer) in pairwise(texts):
        if (role, next_role) == ("user", "assistant") and text.strip() and answer.strip():
            prompt = Prompt(text, model, system, history_characters)
            rows.append(Row(prompt, _counted(answer, answer_tokens), group=group))
        history_characters += len(text)
    if not rows:
        raise _BadRecord(f"no answered user turn in {column!r}")
    return rows


def _turn(turn: Any, column: str) -> tuple[str, str]:
    """The role ("" for a role outside ROLES, such as a tool) and the text, which may be empty."""
    if not isinstance(turn, Mapping):
        raise _BadRecord(f"a turn that is not a JSON object in {column!r}")
    role, content = (
        next((turn[key] for key in keys if turn.get(key) is not None), "")
        for keys in (("role", "from"), ("content", "value"))
    )
    if isinstance(content, list):  # parts, joined as in the server
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = " ".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str):
        raise _BadRecord(f"a turn without text in {column!r}")
    return ROLES.get(str(role).lower(), ""), _encodable(content)


def _model(record: Mapping[str, Any], columns: Columns) -> str:
    return _encodable(str(record.get(columns.model) or ""))


def _text(record: Mapping[str, Any], column: str) -> str:
    text = record.get(column)
    if not isinstance(text, str):
        raise _BadRecord(f"no text in {column!r}")
    return _encodable(text)


def _encodable(text: str) -> str:
    """The text, encodable as UTF-8. JSON may hold half a surrogate pair, on which tokenizers and files fail."""
    return text.encode("utf-8", "replace").decode()


def _filled(text: str, column: str) -> str:
    if not text.strip():
        raise _BadRecord(f"empty text in {column!r}")
    return text


def _whole(record: Mapping[str, Any], column: str, least: int, most: int = NUMBER_MAX) -> int:
    number = record.get(column)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise _BadRecord(f"no number in {column!r}")
    if (isinstance(number, float) and not number.is_integer()) or number < least:
        raise _BadRecord(f"not a whole number above {least - 1} in {column!r}")
    if number > most:
        raise _BadRecord(f"not a plausible number in {column!r}: above {most}")
    return int(number)


def _optional_whole(record: Mapping[str, Any], column: str, least: int) -> int | None:
    return None if record.get(column) is None else _whole(record, column, least)


def _stop(stop: Any, column: str) -> tuple[str, ...]:
    texts = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _BadRecord(f"neither a text nor a list of texts in {column!r}")
    return tuple(_encodable(text) for text in texts if text)


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
