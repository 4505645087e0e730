"""Fig. 1 (b): four requests of 1, 5, 2 and 6 seconds, in batches of two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bins.edges import Edges
from llmserve.commands.simulate import Scenario, simulate
from llmserve.settings.policies import SchedulingConfig
from papers.rows import Row

FIGURE = "Fig. 1 (b)"
LENGTHS_S = (1, 5, 2, 6)
SECONDS: dict[Edges, float] = {(): 11.0, (3.5,): 8.0}  # published: with one bin, and with two (up to 3 s, from 4 s)


def rows(folder: Path) -> Iterator[Row]:
    """folder : for the simulated trace"""
    trace = folder / "example.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"0,0,{length}\n" for length in LENGTHS_S))
    for edges, published_s in SECONDS.items():
        scenario = Scenario(trace=str(trace), step_s=1.0, barrier=True)
        scheduling = SchedulingConfig(
            bins=len(edges) + 1, edges=edges, batch_size=2, release="full", edges_refit_every=0
        )
        summary = simulate(scenario, scheduling)
        yield Row(FIGURE, {"bins": len(edges) + 1}, "time for all", "s", summary.elapsed_s, published_s)
