#!/usr/bin/env python
"""Write what campaigns measured where people and programs look for it.

    python scripts/lab/gpu/page.py

Reads docs/results/gpu/DEVICE/*.json. Writes docs/results/gpu.md, the figures beside the results, and
bins/profiles/DEVICE-MODEL.json, the profiles that `simulate`, `solve` and `serve` take by name. What was not measured
has no table. The file docs/results/gpu/DEVICE/notes.txt, written by hand, stands before the device's tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit import ROOT
from kit.arguments import parser_of
from kit.tables import markdown

from gpu import bins_part, energy_part, predictor_part, profile_part, refill_part
from gpu.campaign import PARTS
from gpu.plans import FULL
from gpu.steps import Results

RESULTS, PAGE, PROFILES = ROOT / "docs/results/gpu", ROOT / "docs/results/gpu.md", ROOT / "bins/profiles"
HEAD = """# On a GPU

What steps, bins, refilling slots, waiting and the predictor cost and gain on a GPU. `scripts/lab/gpu/campaign.py`
measures on whatever NVIDIA GPU it finds, the most valuable first; [its README](../../scripts/lab/gpu/README) tells how.
`python scripts/lab/gpu/page.py` writes this page from docs/results/gpu.

The models are Llamas of real shape with random weights: a step costs what a step of the real model costs, and each
answer has the length that its prompt asks for. The embedded engine runs them, with a static cache and a captured CUDA
graph for each step; slots that refill are those of transformers' continuous batching. A step's time is by the device's
own events. The floor of a step is the time to read its weights and its cached keys and values once, at the bandwidth
of a copy on the same device.
"""
NO_DEVICE = """## Not measured yet

No GPU has been at hand. Ready, and rehearsed on a CPU by the same code, are: step times, prefill and joules of models
of 1 and of 8 billion weights; batches that run to their end with and without bins and windows, beside the simulator's
forecast; a burst on slots that refill; joules for each token at low load, beside the plan's forecast; and the exported
length predictor.
"""
NOTHING = "Not measured yet."


def main() -> None:
    parser_of(__doc__).parse_args()
    for folder in devices(RESULTS):
        for name, part in PARTS.items():
            results = Results.read(folder, name)
            if results.steps:
                part.draw(results, folder / f"{name}.png", FULL)
        for shape in FULL.shapes:
            results = Results.read(folder, profile_part.PART)
            if profile_part.batches_of(results, shape) is not None:
                profile = profile_part.profile(results, shape, folder.name)
                profile.save(PROFILES / f"{profile.name}.json")
    PAGE.write_text(page(RESULTS), encoding="utf-8")


def devices(folder: Path) -> list[Path]:
    """The folders of the devices with results."""
    return sorted({path.parent for path in folder.glob("*/*.json")})


def page(folder: Path, shapes: tuple[str, ...] = FULL.shapes) -> str:
    """The page of the results in this folder."""
    return "\n".join([HEAD, *([_of_device(device, shapes) for device in devices(folder)] or [NO_DEVICE])])


def _of_device(folder: Path, shapes: tuple[str, ...]) -> str:
    sections = {
        profile_part: ("what steps and batches cost", lambda results: _costs(results, shapes, folder.name)),
        bins_part: ("bins and windows", _bins),
        refill_part: ("slots that refill", _refill),
        energy_part: ("energy at low load", _energy),
        predictor_part: ("the length predictor", _predictor),
    }
    results = {part: Results.read(folder, part.PART) for part in sections}
    name = next(of.device for of in results.values() if of.device)
    notes = folder / "notes.txt"
    texts = [f"## {name}\n", *([f"{notes.read_text(encoding='utf-8').strip()}\n"] if notes.exists() else [])]
    for part, (title, tables) in sections.items():
        body = "\n\n".join(tables(results[part])) if results[part].steps else NOTHING
        figure = f"{part.PART}.png"
        picture = f"\n\n![{title}](gpu/{folder.name}/{figure})" if (folder / figure).exists() else ""
        texts.append(f"### {folder.name}: {title}\n\n{body}{picture}\n{_runs(results[part])}")
    return "\n".join(texts)


def _runs(results: Results) -> str:
    lines = []
    for run in results.runs:
        others = f" **The GPU was not free when this run began: {run['others']}.**" if "others" in run else ""
        lines.append(f"* {run['date']}, joules by {run['energy']}: `{run['command']}`{others}")
    lines += [f"* Noted during {step}: {note}" for step, notes in results.notes.items() for note in notes]
    lines += [f"* Not measured: {step} ({why})" for step, why in results.failed.items()]
    return "".join(f"\n{line}" for line in lines) + "\n" if lines else ""


# ---- what steps and batches cost ----------------------------------------------------------------------------------


def _costs(results: Results, shapes: tuple[str, ...], device: str) -> Iterator[str]:
    for shape in shapes:
        if timed := profile_part.step_times(results, shape):
            moved = (profile_part.copied(results, shape) or 0.0) / 1e12
            yield (
                f"{shape}: milliseconds of a step, median. In brackets: the floor's share of that time. A copy on the "
                f"device moved {moved:.2f} TB/s, read and written bytes counted."
            )
            yield _steps_table(timed, profile_part.prefill_times(results, shape))
        if (measured := profile_part.batches_of(results, shape)) is not None:
            yield _profile_text(results, shape, device)
            yield _batches_table(measured)
            rates = profile_part.rates(measured)
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


def _steps_table(timed: list[dict[str, Any]], prefills: list[dict[str, Any]]) -> str:
    contexts = sorted({step["context"] for step in timed})
    by_case = {(step["rows"], step["context"]): step for step in timed}
    prefill_s = {prefill["rows"]: prefill["prefill_s"] for prefill in prefills}
    lines = [
        [
            f"{rows}",
            *[
                f"{1e3 * step['step_s']:.2f} ({step['share_of_floor']:.0%})"
                if (step := by_case.get((rows, context)))
                else ""
                for context in contexts
            ],
            f"{1e3 * prefill_s[rows]:.1f}" if rows in prefill_s else "",
        ]
        for rows in sorted({step["rows"] for step in timed})
    ]
    head = ["sequences", *[f"context {context}" for context in contexts], "prefill of 128 tokens each"]
    return markdown(head, lines, right=True)


def _profile_text(results: Results, shape: str, device: str) -> str:
    profile = profile_part.profile(results, shape, device)
    step_s, step_j = profile.step_s, profile.step_j
    text = (
        f"The profile `{profile.name}`: a step of b sequences takes {1e3 * step_s.slope:.4g} b + "
        f"{1e3 * step_s.intercept:.4g} ms (error {step_s.error:.1%}). A prefill takes {1e3 * profile.prefill_s:.4g} ms."
    )
    if profile.misfit:
        text += f" **Not reliable**: {profile.misfit}"
    if profile.energy_known:
        text += (
            f" A step draws {step_j.slope:.4g} b + {step_j.intercept:.4g} J (error {step_j.error:.1%}), "
            f"the idle GPU {profile.idle_w:.4g} W."
        )
    return text


def _batches_table(measured: dict[str, Any]) -> str:
    """The longer batches of each size: tokens/s, watts and joules a token."""
    rates, joules = profile_part.rates(measured), profile_part.joules_per_token(measured)
    lines = [
        [
            str(size),
            f"{rate:,.0f}",
            f"{joules[size]:.3f}" if size in joules else "",
            f"{joules[size] * rate:.0f}" if size in joules else "",
        ]
        for size, rate in rates.items()
    ]
    return markdown(["batch", "tokens/s", "J a token", "watts"], lines, right=True)


# ---- the other parts ----------------------------------------------------------------------------------------------


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
            _joules(row["joules_per_token"]),
            _joules(row["forecast_joules_per_token"]),
        ]
        for row in rows
    ]
    if not lines:
        yield NOTHING
        return
    far = len(bins_part.unforetold(rows))
    yield (
        f"{len(rows) - far} of {len(rows)} gains over one bin are within {bins_part.WITHIN:.0%} of what `simulate` "
        "foretells from the measured profile."
    )
    head = ["batch", "bins", "lengths", "tokens/s", "gain", "foretold", "the paper's", "J a token", "foretold (J)"]
    yield markdown(head, lines, right=True)


def _joules(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _refill(results: Results) -> Iterator[str]:
    rows = refill_part.rows(results)
    lines = [
        [
            *(str(row["slots"]), "arrival" if row["order"] == refill_part.ARRIVAL else row["order"]),
            f"{row['tokens_per_s']:,.0f}",
            *(f"{row[f'latency_s_{name}']:.2f}" for name in ("mean", "p50", "p95")),
            _joules(row["joules_per_token"]),
        ]
        for row in rows
    ]
    yield f"A burst of {rows[0]['requests']} requests with known lengths, all at once: seconds until they are answered."
    yield markdown(["slots", "order", "tokens/s", "mean (s)", "median (s)", "p95 (s)", "J a token"], lines, right=True)


def _energy(results: Results) -> Iterator[str]:
    rows = energy_part.savings(results)
    if not rows:
        yield NOTHING
        return
    waiting = [row for row in rows if row["release"] != "greedy"]
    far = len(energy_part.unforetold(waiting))
    yield (
        f"{len(waiting) - far} of {len(waiting)} savings are within {100 * energy_part.WITHIN:.0f} points of the "
        "forecast. Joules of the whole GPU from the first arrival to the last end, idle time counted."
    )
    lines = [
        [
            *(f"{row['load']:g}", row["release"], f"{row['joules_per_token']:.3f}", f"{row['saved']:.0%}"),
            f"{row['forecast_saved']:.0%}",
            f"{row['joules'] / row['seconds']:.0f}",
            f"{row['plan_power_w']:.0f}" if row["plan_power_w"] is not None else "",
            *(f"{row['latency_s_p95']:.2f}", f"{row['forecast_latency_s_p95']:.2f}"),
        ]
        for row in rows
    ]
    head = ["load", "release", "J a token", "saved", "foretold", "watts", "plan's", "p95 (s)", "foretold (s)"]
    yield markdown(head, lines, right=True)


def _predictor(results: Results) -> Iterator[str]:
    lines = [
        [where, f"{1e3 * row['alone_s']:.2f}", f"{row['prompts_per_s']:,.0f}"]
        for where, row in predictor_part.rows(results).items()
    ]
    yield markdown(["where", "ms, one prompt", "prompts a second, many at once"], lines, right=True)


if __name__ == "__main__":
    main()
