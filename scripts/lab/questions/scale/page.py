"""The page docs/results/scale.md, from the rows of the parts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit import ROOT
from kit.results import read_parts, with_rows, write_text
from kit.rows import Row, group, select
from kit.tables import markdown

from questions.scale.load import SHORT_EVERY_US
from questions.scale.sides import KEYS, ONE

Parts = Mapping[str, Any]
"""Of scale.json: {part: {"command", "date", "cores", "python", "rows"}}; rows of kills have their commands."""

OUTPUT, PAGE = (ROOT / "docs" / "results" / name for name in ("scale.json", "scale.md"))

TITLES = {
    "events": "Streams below what one process can carry",
    "overload": "Streams above it",
    "short": "Short streams that begin all the time",
    "whole": "Answers that are not streamed",
}
TEXTS = {
    "events": "Processor time of all processes of a front-end, for each event that its clients have read.",
    "overload": "The machine is full here: a front-end that is late reads several events at once and writes them as "
    "one, so that an event costs less and comes later. Where engine and clients take the rest of the cores, the rate "
    "is the machine's limit.",
    "short": "Streams of 16 events, the first after 10 ms and then one each 10 ms, that begin at this rate however "
    "many run. Late: streams that had no event ten seconds after the last had begun.",
    "whole": "32 connections ask again when they are answered. With drawn words no two prompts are equal, so that "
    "each is forecast anew; equal prompts are the best case.",
}
STREAM_COLUMNS = {
    "µs an event": ("cpu_us", ".1f"),
    "of it the scheduler process": ("cpu_scheduler_us", ".2f"),
    "delay p50, ms": ("delay_ms_p50", ".2f"),
    "p99, ms": ("delay_ms_p99", ".1f"),
    "events a read": ("events_a_read", ".2f"),
    "events/s": ("events_per_s", ",.0f"),
    "cores": ("cores", ".2f"),
    "cores of engine and clients": ("cores_load", ".2f"),
    "KB of memory a stream": ("memory_kb_a_stream", ".0f"),
}
SHORT_COLUMNS = {
    "first event p50, ms": ("first_ms_p50", ".2f"),
    "p99, ms": ("first_ms_p99", ".1f"),
    "cores": ("cores", ".2f"),
    "cores of engine and clients": ("cores_load", ".2f"),
    "late": ("late", ".0f"),
}
WHOLE_COLUMNS = {
    "µs a request": ("cpu_us", ".0f"),
    "of it the scheduler process": ("cpu_scheduler_us", ".0f"),
    "requests/s": ("requests_per_s", ",.0f"),
    "p50, ms": ("first_ms_p50", ".2f"),
    "p99, ms": ("first_ms_p99", ".1f"),
    "cores of engine and clients": ("cores_load", ".2f"),
}
COLUMNS = {"events": STREAM_COLUMNS, "overload": STREAM_COLUMNS, "short": SHORT_COLUMNS, "whole": WHOLE_COLUMNS}
RATIO = {"events": "cpu_us", "overload": "delay_ms_p99", "short": "first_ms_p50", "whole": "cpu_us"}
RELAYS_80 = 0.8  # of a relay's core
CORES, BESIDE = 16, 3  # of a machine; of them for the scheduler process, the engines' hosts and the system
HEAD = """# Many cores: relay workers

    python scripts/lab scale --router .venv-router/bin/vllm-router

One process of llmserve holds its clients' connections and schedules. With `--workers N` relays hold them, and one
process beside them schedules ([the guide](../guide/many-cores.md)). What does an event cost, what a request, and how
late are events? vllm-router (Rust) and nginx (proxy_pass, no buffering, one worker: a floor, for it decides nothing)
stand before the same engine where they are installed.

Engine and clients are written in C (`load.c` beside the study) and run on the same cores; what they take
is a column. An event has some 230 bytes and is one write of the engine; it carries the time of its sending. **Times
are processor time, user and system, of all processes of a front-end**, so other work on the machine lengthens them by
cold caches alone. The front-ends take turns within each round; tables have medians over the rounds, and the ratio to
one process is the median of the rounds' ratios. This page is written by the command from `scale.json`.
"""
SIXTEEN = """## Where there are 16 cores

Measured on such a machine: nothing. The arithmetic, from the medians above:

{table}

It takes for granted that relays do not slow each other down (no shared lock; the memory's bandwidth suffices), and
that the system deals connections evenly. To measure it there, with engine and clients of several processes:

```
python scripts/lab scale --workers 1 2 4 8 13 --engines 4 --clients 4 --parts events short whole
python scripts/lab scale --workers 1 8 13 --engines 4 --clients 4 --times 8 --parts overload
```
"""


KILLS = """## kill -9

Requests in flight all the time, two fifths of them on the engine, streamed and whole in turn. Each answer must be
whole and have exactly the tokens that were asked for, unless its relay was killed; charged are the tokens that the
key's budget has lost in the usage file.

{commands}

{table}

{date}. Broken answers are those of relays that were killed: what had been generated of them is charged, too, as far as
the scheduler process knew.
"""
KILLS_COLUMNS = {
    "killed": "name",
    "relays": "relays",
    "scheduler processes": "scheduler",
    "in flight": "in_flight",
    "answered": "answered",
    "broken with their relay": "broken",
    "sent to an engine again": "asked_again",
    "tokens charged over answered": "ratio",
    "faults": "fault",
}


def save(name: str, part: Mapping[str, Any], output: Path, page_file: Path) -> None:
    """Put a part in the place of its former figures, and write the page anew."""
    parts = {**read_parts(output), name: part}
    lines = [f'"{name}": {with_rows(part, "rows")}' for name, part in parts.items()]
    write_text(output, "{\n" + ",\n".join(lines) + "\n}")
    write_text(page_file, page(parts))


def page(parts: Parts) -> str:
    names = ("load", "side", "round")
    rows = {name: [Row.of_record(row, names) for row in parts[name]["rows"]] for name in TITLES if name in parts}
    sections = [HEAD, *_figures(rows)]
    for name in rows:
        sections.append(f"## {TITLES[name]}\n\n{TEXTS[name]}\n\n    {parts[name]['command']}\n")
        sections += [_table(name, load, of_load) for (load,), of_load in group(rows[name], "load").items()]
        sections.append(f"{parts[name]['date']}, {parts[name]['cores']} cores, Python {parts[name]['python']}.\n")
    sections += [_kills(parts["kills"])] if "kills" in parts else []
    return "\n".join([*sections, *_sixteen(rows)]).rstrip("\n")


# ---- tables ---------------------------------------------------------------------------------------------------------


def median(rows: Sequence[Row], name: str) -> float | None:
    """Over the rounds in which there was such a number."""
    values = [row[name] for row in rows if name in row.numbers]
    return float(statistics.median(values)) if values else None


def ratio(rows: Sequence[Row], references: Sequence[Row], name: str) -> float | None:
    """Median of the rounds' ratios."""
    reference = {row["round"]: row[name] for row in references if name in row.numbers}
    pairs = [row[name] / reference[row["round"]] for row in rows if name in row.numbers and row["round"] in reference]
    return float(statistics.median(pairs)) if pairs else None


def _table(part: str, load: str, rows: Sequence[Row]) -> str:
    one, by_side = select(rows, side=ONE), group(rows, "side")
    columns = {head: of for head, of in COLUMNS[part].items() if any(of[0] in row.numbers for row in rows)}
    of_ratio = next(head for head, (name, _) in columns.items() if name == RATIO[part])
    lines = []
    for (side,), of_side in by_side.items():
        cells = [_shown(median(of_side, name), shape) for name, shape in columns.values()]
        lines.append([side, *cells, _shown(ratio(of_side, one, RATIO[part]), ".2f")])
    return markdown([load, *columns, f"{of_ratio}, to one process"], lines, right=True) + "\n"


def _shown(value: float | None, shape: str) -> str:
    return "" if value is None else format(value, shape)


def _kills(part: Mapping[str, Any]) -> str:
    lines = []
    for row in part["rows"]:
        ratio_ = row["tokens_charged"] / max(1, row["tokens_answered"])
        told = {**row, "ratio": f"{ratio_:.4f}", "fault": sum(row["faults"].values())}
        lines.append(
            [f"{told[name]:,}" if isinstance(told[name], int) else str(told[name]) for name in KILLS_COLUMNS.values()]
        )
    commands = "\n".join([f"    {row['command']}" for row in part["rows"]])
    return KILLS.format(commands=commands, table=markdown(list(KILLS_COLUMNS), lines, right=True), date=part["date"])


# ---- figures --------------------------------------------------------------------------------------------------------


def _figures(rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    lines = [
        [what, goal, _shown(value, shape), _reached(value, most)] for what, goal, value, most, shape in _goals(rows)
    ]
    if lines:
        yield "## In short\n"
        yield markdown(["", "goal", "measured", ""], [line for line in lines if line[2]]) + "\n"


def _reached(value: float | None, most: float) -> str:
    return "" if value is None or value <= most else "**not reached**"


def _goals(rows: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, str, float | None, float, str]]:
    """(what, its goal, the value, the largest that reaches the goal, format)."""
    events = select(rows.get("events", ()), load="1,000 streams x 20/s")
    sums = [median(select(events, side=name), "cpu_relays_us") for name in ("2 relays", "4 relays")]
    spread = sums[1] / sums[0] if sums[0] is not None and sums[1] is not None else None
    yield "an event in 4 relays, to 2 relays", "1.10", spread, 1.1, ".2f"
    for name in ("2 relays", "4 relays"):
        value = ratio(select(events, side=name), select(events, side=ONE), "cpu_us")
        yield f"an event with {name}, to one process", "1.00", value, 1.0, ".2f"
    for load in ("equal prompts", "200 drawn words"):
        of = select(rows.get("whole", ()), load=load, side=f"2 relays{KEYS}")
        what = f"the scheduler process for a request with forecasts, limits and metrics, {load}, µs"
        yield what, "130", median(of, "cpu_scheduler_us"), 130.0, ".0f"
    over = select(rows.get("overload", ()), load="1,000 streams x 50/s")
    late = ratio(select(over, side="2 relays"), select(over, side=ONE), "delay_ms_p99")
    yield "1,000 streams x 50/s, p99 of an event's delay with 2 relays, to one process", "0.50", late, 0.5, ".2f"
    short = select(rows.get("short", ()), load="500/s")
    for name in (ONE, "2 relays"):
        first = median(select(short, side=name), "first_ms_p50")
        beyond = None if first is None else first - SHORT_EVERY_US / 1_000
        what = f"500 short streams a second, first event p50 with {name}, beyond the engine's own 10 ms, ms"
        yield what, "3", beyond, 3.0, ".2f"


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def _sixteen(rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    events = select(rows.get("events", ()), load="1,000 streams x 20/s")
    requests = select(rows.get("whole", ()), load="200 drawn words")
    event = {name: median(select(events, side=name), "cpu_us") for name in (ONE, "2 relays")}
    scheduler = median(select(requests, side=f"2 relays{KEYS}"), "cpu_scheduler_us")
    one = median(select(requests, side=f"{ONE}{KEYS}"), "cpu_us")
    if None in (*event.values(), scheduler, one):
        return
    relays = CORES - BESIDE
    head = ["80 % of each core", "one process", f"{relays} relays and the scheduler process"]

    def per_s(us: float | None, cores: float) -> str:
        return f"{cores * RELAYS_80 * 1e6 / (us or 1.0):,.0f}"

    lines = [
        ["events/s, each read alone", per_s(event[ONE], 1), per_s(event["2 relays"], relays)],
        ["requests/s with keys and limits, 200 words each", per_s(one, 1), per_s(scheduler, 1)],
    ]
    yield SIXTEEN.format(table=markdown(head, lines, right=True))
