#!/usr/bin/env python
"""Write what a campaign measured where people and programs look for it.

    python scripts/lab/gpu/page.py

Reads docs/results/h200/*.json. Writes docs/results/h200.md and its figures, and bins/profiles/h200-*.json, the profiles
that `simulate`, `solve` and `serve` take by name. A part that was not measured has no table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import ROOT
from bench.arguments import parser_of
from bench.tables import markdown

from gpu import bins_part, energy_part, predictor_part, profile_part
from gpu.plans import FULL
from gpu.steps import Results

RESULTS, PAGE, PROFILES = ROOT / "docs/results/h200", ROOT / "docs/results/h200.md", ROOT / "bins/profiles"
PARTS = {"profile": profile_part, "bins": bins_part, "energy": energy_part, "predictor": predictor_part}
HEAD = """# On an H200

Measurements on one NVIDIA H200, made by `scripts/lab/gpu/campaign.py`; `python scripts/lab/gpu/page.py` writes this
page from docs/results/h200. The models are Llamas of real shape with random weights: a step costs what a step of the
real model costs, and each answer has the length that its prompt asks for. The embedded engine runs them, with a static
cache and a captured CUDA graph for each step.
"""
NOTHING = "Not measured yet."


def main() -> None:
    parser_of(__doc__).parse_args()
    PAGE.write_text(page(RESULTS), encoding="utf-8")
    for name, part in PARTS.items():
        results = _results(RESULTS, name)
        if results.steps:
            part.draw(results, RESULTS / f"{name}.png", FULL)
    for shape in FULL.shapes:
        results = _results(RESULTS, "profile")
        if f"{shape}: {profile_part.BATCHES}" in results.steps:
            profile = profile_part.profile(results, shape)
            profile.save(PROFILES / f"{profile.name}.json")


def page(folder: Path) -> str:
    """The page of the results in this folder."""
    sections = {
        "profile": ("What steps and batches cost", _costs),
        "bins": ("Bins and windows", _bins),
        "energy": ("Energy at low load", _energy),
        "predictor": ("The length predictor", _predictor),
    }
    parts = [HEAD]
    for name, (title, tables) in sections.items():
        results = _results(folder, name)
        body = "\n\n".join(tables(results)) if results.steps else NOTHING
        picture = f"\n\n![{title}](h200/{name}.png)" if (folder / f"{name}.png").exists() else ""
        parts.append(f"## {title}\n\n{body}{picture}\n{_runs(results)}")
    return "\n".join(parts)


def _results(folder: Path, part: str) -> Results:
    return Results.read(folder, part)


def _runs(results: Results) -> str:
    lines = [f"* {run['date']}, {run['device']}: `{run['command']}`" for run in results.runs]
    failed = [f"* Not measured: {step} ({why})" for step, why in results.failed.items()]
    return "".join(f"\n{line}" for line in (*lines, *failed)) + "\n" if lines or failed else ""


def _costs(results: Results) -> Iterator[str]:
    for shape in FULL.shapes:
        if (timed := results.steps.get(f"{shape}: {profile_part.STEPS}")) is not None:
            sheet, copied = (timed[f"{name}_bytes_per_s"] / 1e12 for name in ("data_sheet", "copy"))
            yield (
                f"{shape}: milliseconds of a step. In brackets: the share of that time which reading weights and cache "
                f"once takes at the data sheet's {sheet:g} TB/s. A copy on the device moved {copied:.2f} TB/s."
            )
            yield _steps_table(timed["steps"])
        if f"{shape}: {profile_part.BATCHES}" in results.steps:
            profile = profile_part.profile(results, shape)
            step_s, step_j = profile.step_s, profile.step_j
            text = (
                f"The profile `{profile.name}`: a step of b sequences takes {1e3 * step_s.slope:.4g} b + "
                f"{1e3 * step_s.intercept:.4g} ms (error {step_s.error:.1%}). A prefill takes "
                f"{1e3 * profile.prefill_s:.4g} ms."
            )
            if profile.misfit:
                text += f" **Not reliable**: {profile.misfit}"
            if profile.energy_known:
                text += (
                    f" A step draws {step_j.slope:.4g} b + {step_j.intercept:.4g} J (error {step_j.error:.1%}), "
                    f"the idle GPU {profile.idle_w:.4g} W."
                )
            yield text
            rates = profile_part.rates(results.steps[f"{shape}: {profile_part.BATCHES}"])
            least, most = min(rates), max(rates)
            yield (
                f"Batches of {most} produce {rates[most]:,.0f} tokens/s, {rates[most] / rates[least]:.1f} times "
                f"batches of {least} (Multi-Bin, Fig. 1 a)."
            )
        for line in results.steps.get(f"{shape}: {profile_part.LINE}", ()):
            yield (
                f"{shape}, batches of {line['size']}: time is linear in the longest answer with R² "
                f"{line['r_squared']:.4f}, {1e3 * line['token_s']:.4g} ms a token (Multi-Bin, Fig. 5)."
            )


def _steps_table(timed: list[dict[str, Any]]) -> str:
    contexts = sorted({step["context"] for step in timed})
    best = {(step["rows"], step["context"]): step for step in timed if step["fused"]}
    lines = [
        [f"{rows}"]
        + [
            f"{1e3 * step['step_s']:.2f} ({step['share_of_floor']:.0%})" if (step := best.get((rows, context))) else ""
            for context in contexts
        ]
        for rows in sorted({step["rows"] for step in timed})
    ]
    return markdown(["sequences", *[f"context {context}" for context in contexts]], lines, right=True)


def _bins(results: Results) -> Iterator[str]:
    rows = bins_part.gains(results)
    lines = [
        [
            str(row["batch_size"]),
            "window" if row["bins"] == bins_part.WINDOW else str(row["bins"]),
            row["predictions"],
            f"{row['tokens_per_s']:,.0f}",
            f"{row['gain']:.2f}",
            f"{row['forecast']:.2f}",
            f"{row['published']:.2f}" if row["published"] else "",
        ]
        for row in rows
    ]
    head = ["batch", "bins", "lengths", "tokens/s", "gain", "foretold", "the paper's"]
    if lines:
        far = len(bins_part.unforetold(rows))
        yield f"{len(rows) - far} of {len(rows)} gains are within {bins_part.WITHIN:.0%} of the simulator's forecast."
        yield markdown(head, lines, right=True)
    for name, step in results.steps.items():
        if name.startswith(bins_part.CONTINUOUS):
            yield f"{name}: {step['tokens_per_s']:,.0f} tokens/s."


def _energy(results: Results) -> Iterator[str]:
    rows = energy_part.savings(results)
    lines = [
        [
            *(f"{row['load']:g}", row["release"], f"{row['joules_per_token']:.3f}", f"{row['saved']:.0%}"),
            *(
                f"{row['forecast_saved']:.0%}",
                f"{row['goal']:.0%}" if row["goal"] else "",
                f"{row['latency_s_p95']:.2f}",
            ),
        ]
        for row in rows
    ]
    head = ["load", "release", "J a token", "saved", "foretold", "goal", "p95 (s)"]
    yield markdown(head, lines, right=True)


def _predictor(results: Results) -> Iterator[str]:
    lines = [
        [where, f"{1e3 * row['alone_s']:.2f}", f"{row['prompts_per_s']:,.0f}"]
        for where, row in predictor_part.rows(results).items()
    ]
    yield markdown(["where", "ms, one prompt", "prompts a second, many at once"], lines, right=True)


if __name__ == "__main__":
    main()
