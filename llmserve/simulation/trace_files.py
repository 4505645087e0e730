"""Files of recorded requests in the forms in which they are published -> arrival times and lengths.

The columns of a file say which form it has. Each form has its own unit of time; a number that is too large for it to be
seconds or milliseconds since a start is a Unix time in smaller units.
"""

from __future__ import annotations

import functools
import math
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import ConfigError
from llmserve.simulation.files import is_number, records
from llmserve.simulation.kv_pool import Text
from predictor.records import Malformed

UNIX_SECONDS_MAX = 1e11  # the year 5138: larger numbers of seconds are counts of milli-, micro- or nanoseconds
UNIX_SECONDS_MIN = 1e9  # the year 2001: no trace begins so many seconds after the begin of a run
SMALLER = 1000.0


@dataclass(frozen=True, slots=True)
class Form:
    """One form of traces.

    arrival, input_tokens, output_tokens  its columns; a.b is the field b of the object a
    unit_s      seconds of a unit of the arrival; 0 where the arrival must be a date and time
    also        a further column, without which another form is meant
    without     a column with which another form is meant
    is_offset   arrivals count from the begin of the run, so the first request may come later than at 0
    """

    name: str
    arrival: str
    input_tokens: str
    output_tokens: str
    unit_s: float = 1.0
    also: str = ""
    without: str = ""
    is_offset: bool = False

    @property
    def amounts(self) -> tuple[str, str, str]:
        return self.arrival, self.input_tokens, self.output_tokens

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.amounts, self.also) if self.also else self.amounts

    def __str__(self) -> str:
        return f"{', '.join(self.columns)} ({self.name})"


OWN = Form("llmserve's own", "arrival_s", "input_tokens", "output_tokens", is_offset=True)
FORMS = (
    OWN,
    Form("Azure's traces of LLM inference", "TIMESTAMP", "ContextTokens", "GeneratedTokens", unit_s=0),
    Form("BurstGPT", "Timestamp", "Request tokens", "Response tokens"),
    Form("Mooncake", "timestamp", "input_length", "output_length", unit_s=1e-3, also="hash_ids", without="chat_id"),
    Form("Qwen's traces of Bailian", "timestamp", "input_length", "output_length", also="chat_id"),
    Form("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    Form("SplitwiseSim", "arrival_timestamp", "prompt_size", "token_size"),
    Form("LLMServingSim", "arrival_time_ns", "input_toks", "output_toks", unit_s=1e-9),
    Form("vllm bench serve --save-detailed", "start_times", "input_lens", "output_lens"),
    Form("requests of guidellm", "request_start_time", "prompt_tokens", "output_tokens"),
    Form(
        "profile_export.jsonl of AIPerf",
        *("metadata.request_start_ns", "metrics.input_sequence_length.value", "metrics.output_sequence_length.value"),
        unit_s=1e-9,
    ),
)
"""What can be read. Names of columns are compared without case, spaces, dashes and underscores."""
KNOWN_FORMS = f"a trace has the columns of one of these forms: {'; '.join(map(str, FORMS))}"
NO_UNIT = {"timestamp", "inputlength", "outputlength"}
"""Columns that Mooncake's traces have in milliseconds and others in seconds."""


SHARED = ("session", "prefix", "prefix_tokens")
"""Optional columns of OWN: what prompts have in common, see `_text`."""


@dataclass(slots=True)
class TraceRows:
    """Requests in order of arrival; (count,) each. texts : the prompts; None: the file has no column of SHARED"""

    arrivals_s: NDArray[np.float64]
    output_tokens: NDArray[np.float64]
    input_tokens: NDArray[np.float64]
    texts: tuple[Text, ...] | None = None


def read_rows(name: str, count_max: int | None = None) -> TraceRows:
    """The first requests, at most count_max, of a file in one of FORMS: CSV, JSON or Parquet, plain or compressed.

    Requests whose answers have no tokens have failed: they are left out, and counted on stderr. Rows that are out of
    order are sorted. Arrivals count from the first request, except in OWN.
    Raises ConfigError, which names the file and the line that cannot be read.
    """
    arrivals, inputs, outputs = array("d"), array("d"), array("d")
    texts: list[Text] = []
    failed, is_sorted, last_s, read = 0, True, -math.inf, None
    for line, record in _whole_records(name):
        if count_max is not None and len(outputs) == count_max and is_sorted:
            break
        try:
            read = read or Columns.of(record)
            arrival_s, input_tokens, output_tokens = read(record)
            if read.shares and output_tokens:
                texts.append(_text(record, input_tokens, len(outputs)))
        except ValueError as error:
            raise ConfigError(f"the trace {name!r}, line {line}: {error}") from error
        if output_tokens == 0:
            failed += 1
            continue
        is_sorted = is_sorted and arrival_s >= last_s
        last_s = arrival_s
        arrivals.append(arrival_s)
        inputs.append(input_tokens)
        outputs.append(output_tokens)
    if read is None:
        raise ConfigError(f"the trace {name!r} has no rows; {KNOWN_FORMS}")
    if not outputs:
        raise ConfigError(f"the trace {name!r} has no request with an answer")
    if failed:
        _tell(f"{name}: left out requests that have failed, or whose answers are empty: {failed:,}")
    return _in_order(name, read.form, (arrivals, outputs, inputs), texts, count_max)


@functools.cache
def _tell(note: str) -> None:
    """Once, although each run of a sweep reads the trace."""
    print(note, file=sys.stderr)


def _in_order(
    name: str, form: Form, columns: tuple[array[float], ...], texts: list[Text], count_max: int | None
) -> TraceRows:
    arrivals_s, outputs, inputs = (np.array(column) for column in columns)
    if misplaced := int((np.diff(arrivals_s) < 0).sum()):
        _tell(f"{name}: sorted by arrival; rows that came before the row above them: {misplaced:,}")
    order = np.argsort(arrivals_s, kind="stable")[:count_max]
    arrivals_s, outputs, inputs = arrivals_s[order], outputs[order], inputs[order]
    is_offset = form.is_offset and arrivals_s[0] < UNIX_SECONDS_MIN
    ordered = tuple([texts[place] for place in order.tolist()]) if texts else None
    return TraceRows(arrivals_s if is_offset else arrivals_s - arrivals_s[0], outputs, inputs, ordered)


@dataclass(frozen=True, slots=True)
class Columns:
    """Reads the records of one file. places : of the form's amounts, the names of the fields from the outermost.
    shares : whether there are columns of SHARED
    """

    form: Form
    places: tuple[tuple[str, ...], ...]
    seconds: Callable[[Any], float]
    shares: bool = False

    @classmethod
    def of(cls, record: Any) -> Columns:
        """The columns of a file with this first record. Raises ValueError."""
        form = form_of(record)
        places = tuple(_place(record, column) or () for column in form.amounts)
        shares = form is OWN and any(column in record for column in SHARED)
        return cls(form, places, _clock(_value(record, places[0]), form), shares)

    def __call__(self, record: Any) -> tuple[float, float, float]:
        """(arrival_s, input_tokens, output_tokens); no output tokens if the request has failed. Raises ValueError."""
        if not isinstance(record, Mapping):
            raise ValueError(_no_record(record))
        arrival, inputs, outputs = (_value(record, place) for place in self.places)
        if outputs is None and record.get("error"):
            return -math.inf, 0.0, 0.0
        _, input_column, output_column = self.form.amounts
        return self.seconds(arrival), _amount(inputs, input_column), _amount(outputs, output_column)


def _text(record: Mapping[str, Any], input_tokens: float, number: int) -> Text:
    """The prompt of a row: `prefix_tokens` that rows of the same `prefix` begin with, then its own or its session's.

    Each prompt of a session begins with the prompts and the answers of the session's earlier rows, as far as its tokens
    go. number : of the row. Raises ValueError.
    """
    tokens = max(1, round(input_tokens))
    prefix = min(tokens, round(_amount(record.get("prefix_tokens") or 0, "prefix_tokens")))
    session = record.get("session")
    own = ("row", number) if session in (None, "") else ("session", str(session))
    return ((("prefix", str(record.get("prefix") or "")), prefix), (own, tokens - prefix))


def form_of(record: Any) -> Form:
    """The form of a record. Raises ValueError, which names the nearest form, when the record has none of FORMS."""
    if not isinstance(record, Mapping):
        raise ValueError(f"{_no_record(record)}; {KNOWN_FORMS}")
    having = forms_of(record)
    if len(having) == 1:
        return having[0]
    if having:
        raise ValueError(f"the columns are those of {' and of '.join(map(str, having))}: remove those of one of them")
    names = {_plain(column) for column in record}
    if names >= NO_UNIT:
        raise ValueError(
            "no column hash_ids (Mooncake) or chat_id (Qwen's traces of Bailian), so the unit of timestamp is unknown: "
            f"name the columns as in {OWN}"
        )
    nearest = max(FORMS, key=lambda form: sum(bool(_place(record, column)) for column in form.columns))
    missing = [column for column in nearest.columns if not _place(record, column)]
    raise ValueError(
        f"no column {', '.join(missing)} of {nearest}; it has {', '.join(map(str, record))}; {KNOWN_FORMS}"
    )


def forms_of(record: Any) -> list[Form]:
    """The forms whose columns the record has."""
    return [
        form
        for form in FORMS
        if all(_place(record, column) for column in form.columns)
        and not (form.without and _place(record, form.without))
    ]


def _whole_records(name: str) -> Iterator[tuple[int, Any]]:
    """The records of a file, also of one record with a list for each column."""
    for line, record in records(name, "trace"):
        if isinstance(record, Mapping) and isinstance(record.get("start_times"), list):
            columns = [column for column in record if isinstance(record[column], list)]
            count = len(record["start_times"])
            whole = [column for column in columns if len(record[column]) == count]
            for place in range(count):
                yield line, {column: record[column][place] for column in whole}
        else:
            yield line, record


def _plain(column: Any) -> str:
    return str(column).translate({ord(mark): None for mark in " _-"}).lower()


def _place(record: Any, column: str) -> tuple[str, ...] | None:
    """Where the column is in a record: the names of its fields, from the outermost; None when it is not there."""
    if not isinstance(record, Mapping):
        return None
    if column in record:
        return (column,)
    outer, _, inner = column.partition(".")
    wanted = _plain(outer)
    for name in record:
        if _plain(name) == wanted:
            rest = _place(record[name], inner) if inner else ()
            return None if rest is None else (name, *rest)
    return None


def _value(record: Any, place: tuple[str, ...]) -> Any:
    """None when the record has no such field."""
    for name in place:
        record = record.get(name) if isinstance(record, Mapping) else None
    return record


def _no_record(record: Any) -> str:
    return record.reason if isinstance(record, Malformed) else "not a JSON object"


def _clock(first: Any, form: Form) -> Callable[[Any], float]:
    """Arrival -> seconds, by the first arrival of a file: all arrivals are dates, or all are numbers of one unit."""
    column = form.arrival
    if not isinstance(first, str) or is_number(first):
        if not form.unit_s:
            raise ValueError(f"{column} must be a date and time, not {first!r}")
        unit_s, amount = form.unit_s, _amount(first, column)
        while amount * unit_s >= UNIX_SECONDS_MAX:
            unit_s /= SMALLER
        return lambda value: _amount(value, column) * unit_s
    return lambda value: _moment_s(value, column)


def _moment_s(value: Any, column: str) -> float:
    """Unix time of a date and time; UTC where it names no zone."""
    try:
        moment = datetime.fromisoformat(str(value).strip().removesuffix("UTC").rstrip())
    except ValueError:
        raise ValueError(f"{column} must be a number or a date and time (ISO 8601), not {value!r}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _amount(value: Any, column: str) -> float:
    """A number >= 0. value : None in a row that is too short. Raises ValueError naming the column."""
    try:
        amount = math.nan if isinstance(value, bool) else float("" if value is None else value)
    except (TypeError, ValueError):
        raise ValueError(f"{column} must be a number, not {value!r}") from None
    if not 0 <= amount < math.inf:
        raise ValueError(f"{column} must be finite and at least 0, not {value}")
    return amount
