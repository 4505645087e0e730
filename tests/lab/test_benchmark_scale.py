"""The study of relay workers: its load, its page, and a few kills."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from questions.scale.kills import Asked, answer_of, campaign, judged
from questions.scale.load import Load, all_of, built, engines, measured, quantiles
from questions.scale.page import page

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
SIDES = {"one process": 30.0, "2 relays": 25.0, "4 relays": 26.0}


def row(load: str, side: str, **numbers: float) -> dict[str, Any]:
    return {"load": load, "side": side, "round": 0, **numbers}


def part(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"command": "python scripts/lab scale", "date": "2026-11-28", "python": "3.11", "cores": 2, "rows": [*rows]}


# ---- the load -------------------------------------------------------------------------------------------------------


def test_quantiles_are_those_of_all_clients_together() -> None:
    told = quantiles("delay_ms", [{"320": 99}, {"640": 1}])
    assert told["delay_ms_p50"] == told["delay_ms_p99"] == pytest.approx(1.024, rel=0.02)
    assert quantiles("delay_ms", [{"320": 98}, {"640": 2}])["delay_ms_p99"] == pytest.approx(1048.6, rel=0.02)
    assert quantiles("delay_ms", [{}]) == {}


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None,
    reason="load.c needs epoll and a C compiler: scripts/test installs one",
)
async def test_the_clients_see_the_events_of_the_engine(tmp_path: Path) -> None:
    program = built(tmp_path)
    streams = Load("streams", "streams", count=20, rate_per_s=400.0, tokens=10_000, every_us=20_000)
    short = Load("short", "short", rate_per_s=100.0, tokens=3, every_us=5_000)
    whole = Load("whole", "whole", count=2, words=20)
    async with engines(program, 1) as (engine,):
        for load in (streams, short, whole):
            processes = {"server": all_of(engine)}
            told = await measured(load, program, engine.port, processes, key="none", clients=2, seconds=0.5)
            assert told["failed"] == told["late"] == 0
            assert told["cpu_us"] > 0
            if load is streams:
                assert told["events_per_s"] == pytest.approx(1_000, rel=0.3)
                assert told["delay_ms_p50"] > 0
            else:
                assert told["requests_per_s"] > 0
                assert told["first_ms_p50"] > 0


# ---- the page -------------------------------------------------------------------------------------------------------


def test_the_page_says_which_goals_are_reached() -> None:
    events = [row("1,000 streams x 20/s", side, cpu_us=us, cpu_relays_us=us) for side, us in SIDES.items()]
    delays = {"one process": 80.0, "2 relays": 48.0}
    over = [row("1,000 streams x 50/s", side, cpu_us=10.0, delay_ms_p99=ms) for side, ms in delays.items()]
    text = page({"events": part(*events), "overload": part(*over)})
    assert "an event in 4 relays, to 2 relays | 1.10 | 1.04 |  |" in text
    assert "an event with 2 relays, to one process | 1.00 | 0.83 |  |" in text
    assert "p99 of an event's delay with 2 relays, to one process | 0.50 | 0.60 | **not reached** |" in text
    assert "16 cores" not in text, "there is nothing to multiply yet"


def test_the_arithmetic_is_the_medians_times_the_cores() -> None:
    events = [row("1,000 streams x 20/s", side, cpu_us=us, cpu_relays_us=us) for side, us in SIDES.items()]
    keyed = ", keys and limits"
    requests = [
        row("200 drawn words", f"one process{keyed}", cpu_us=500.0),
        row("200 drawn words", f"2 relays{keyed}", cpu_us=600.0, cpu_scheduler_us=100.0),
    ]
    text = page({"events": part(*events), "whole": part(*requests)})
    assert "| events/s, each read alone | 26,667 | 416,000 |" in text
    assert "| requests/s with keys and limits, 200 words each | 1,600 | 8,000 |" in text


def test_a_round_without_a_number_has_no_ratio() -> None:
    events = [row("1,000 streams x 20/s", "one process"), row("1,000 streams x 20/s", "2 relays", cpu_us=25.0)]
    assert "| 2 relays | 25.0 |  |" in page({"events": part(*events)})


# ---- kills ----------------------------------------------------------------------------------------------------------


def whole(tokens: int, text_tokens: int) -> bytes:
    usage = {"total_tokens": tokens + 5}
    body = json.dumps(
        {"choices": [{"message": {"content": "tok " * text_tokens}}], "usage": usage}, separators=(",", ":")
    )
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body.encode())


def test_an_answer_is_judged_by_all_that_came() -> None:
    asked = Asked(0, 3, stream=False)
    assert judged(asked, whole(3, 3)) == "answered"
    assert asked.used == 8
    assert judged(asked, whole(3, 3)[:-1]) == "broken"
    assert judged(asked, b"") == "broken"
    assert judged(asked, whole(3, 3) * 2).startswith("a second answer")
    assert judged(asked, whole(2, 2)).startswith("not what was asked for")
    assert judged(asked, whole(3, 3).replace(b"200 OK", b"503 No")).startswith("status 503")


def test_chunks_are_read_to_their_end() -> None:
    assert answer_of(CHUNKED + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n") == (200, b"abc")
    for cut in (b"", b"2\r\nab", b"2\r\nab\r\n0\r\n"):
        with pytest.raises(EOFError):
            answer_of(CHUNKED + cut)
    with pytest.raises(ValueError, match="a second answer"):
        answer_of(CHUNKED + b"0\r\n\r\nHTTP/1.1")


@pytest.mark.slow
async def test_no_request_is_lost_or_answered_twice_where_processes_are_killed() -> None:
    of_relays = await campaign(2, 0, 16, step_s=0.02)
    assert (dict(of_relays.faults), of_relays.asked_again) == ({}, 0)
    assert of_relays.answered > 0
    of_scheduler = await campaign(0, 1, 16, step_s=0.02)
    assert dict(of_scheduler.faults) == {}
    assert of_scheduler.broken == 0, "relays hold what waits and what runs"
