"""The benchmark on llama.cpp: its rows, and what llmserve counts. llama.cpp itself is not needed."""

from __future__ import annotations

import re
import sys

from kit.client import get_text
from kit.rows import Row
from kit.servers import front_end, running
from questions.llama import simulated
from questions.llama.run import BARE, DIRECT, RATIOS, Arrangement, rows_of, slots_after
from questions.vllm.passes import session_of

from llmserve.engines.timed.server import FakeEngine


def pass_of(arrangement: Arrangement, number: int, value: float, slots: int = 4) -> Row:
    case = {"slots": slots, "answers": "streams", "arrangement": arrangement.name, "round": number}
    return Row(case, dict.fromkeys(RATIOS, value))


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    direct = [pass_of(DIRECT, number, value) for number, value in enumerate((1.0, 10.0, 100.0))]
    bare = [pass_of(BARE, number, value) for number, value in enumerate((0.5, 4.0, 90.0))]
    other = [pass_of(DIRECT, 0, 2.0, slots=1)]
    first, second, third = rows_of([*direct, *bare, *other])
    assert (first.numbers["latency_s_mean"], first.ratios) == (10.0, {})
    assert second.numbers["latency_s_mean"] == 4.0
    assert second.ratios["direct"]["latency_s_mean"] == 0.5
    assert (third["slots"], third.ratios) == (1, {})


async def test_a_server_that_is_told_nothing_does_not_hear_what_its_engine_counts() -> None:
    async with (
        FakeEngine(model="llmserve-demo") as engine,
        front_end("told", "--engine", engine.url) as told,
        front_end("untold", "--engine", engine.url, told=False) as untold,
        session_of() as session,
    ):
        pages = [await get_text(session, f"{front.url}/metrics") for front in (told, untold)]
        known = [re.findall(r"^llmserve_engine_load_known{.*} (\S+)$", page, re.M) for page in pages]
        assert [float(value) for (value,) in known] == [1, 0]


async def test_the_counted_slots_are_those_of_the_server_in_front() -> None:
    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "llmserve", "serve", "--port", str(port), "--engine", engine.url, "--slots", "3"]

    async with (
        FakeEngine(model="llmserve-demo", step_s=0.001) as engine,
        running("a front", command, ready="/ready") as front,
    ):
        assert await slots_after(front.url, ["Hi"] * 5) == 3


def test_a_simulated_ratio_is_the_median_of_the_ratios_of_the_seeds() -> None:
    runs = [dict.fromkeys(simulated.NUMBERS, value) | {"waiting_s_mean": value / 4} for value in (0.5, 8.0, 30.0)]
    bases = [dict.fromkeys(simulated.NUMBERS, value) for value in (1.0, 10.0, 100.0)]
    row = simulated.row_of(4, "boost", "learnt", runs, bases)
    assert (row["slots"], row["latency_s_mean"], row["waiting_share"]) == (4, 0.5, 0.25)
