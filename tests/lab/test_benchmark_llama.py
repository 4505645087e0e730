"""The benchmark on llama.cpp: its rows, and what llmserve counts. llama.cpp itself is not needed."""

from __future__ import annotations

import sys

from kit.rows import Row
from kit.servers import running
from questions.llama.run import BARE, DIRECT, RATIOS, rows_of, slots_after

from llmserve.engines.timed.server import FakeEngine


def pass_of(arrangement: str, number: int, value: float, slots: int = 4) -> Row:
    return Row({"slots": slots, "arrangement": arrangement, "round": number}, dict.fromkeys(RATIOS, value))


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds() -> None:
    direct = [pass_of(DIRECT, number, value) for number, value in enumerate((1.0, 10.0, 100.0))]
    bare = [pass_of(BARE, number, value) for number, value in enumerate((0.5, 4.0, 90.0))]
    other = [pass_of(DIRECT, 0, 2.0, slots=1)]
    first, second, third = rows_of([*direct, *bare, *other])
    assert (first.numbers["latency_s_mean"], first.ratios) == (10.0, {})
    assert second.numbers["latency_s_mean"] == 4.0
    assert second.ratios["direct"]["latency_s_mean"] == 0.5
    assert (third["slots"], third.ratios) == (1, {})


async def test_the_counted_slots_are_those_of_the_server_in_front() -> None:
    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "llmserve", "serve", "--port", str(port), "--engine", engine.url, "--slots", "3"]

    async with (
        FakeEngine(model="llmserve-demo", step_s=0.001) as engine,
        running("a front", command, ready="/ready") as front,
    ):
        assert await slots_after(front.url, ["Hi"] * 5) == 3
