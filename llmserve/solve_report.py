"""What `llmserve solve` prints and draws."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bins.smdp import Queue
from llmserve.errors import ConfigError
from llmserve.solve import LEVELS, Decision, Problem, SolveReport

BLOCKS = " ▁▂▃▄▅▆▇█"
CHART_ROWS, CHART_MARGIN, AXIS_STEP = 4, 6, 8


def runs(policy: list[int]) -> list[tuple[str, str]]:
    """(states, what is done in them), for as long as it can be said in the same words; the last is without end."""
    largest = policy[-1]
    found: list[tuple[int, str]] = []
    for state, action in enumerate(policy):
        kind = "wait" if action == 0 else "all" if action == state else "full" if action == largest else "some"
        if not found or found[-1][1] != kind:
            found.append((state, kind))
    ends = [state - 1 for state, _ in found[1:]]
    rows = []
    for (first, kind), end in zip(found, [*ends, None], strict=True):
        states = f"{first}+" if end is None else f"{first}" if end == first else f"{first}..{end}"
        served = policy[first : None if end is None else end + 1]
        some = f"{min(served)}" if min(served) == max(served) else f"{min(served)} to {max(served)}"
        words = {"wait": "wait", "all": "serve all that wait", "full": f"serve {largest}", "some": f"serve {some}"}
        rows.append((states, words[kind]))
    return rows


def chart(policy: list[int], width: int) -> list[str]:
    """Bars of the action by the state, CHART_ROWS lines high, and an axis; as many states as there is room for.

    A bar is blank only where nothing is served.
    """
    told = _told(policy)
    count = min(told, width - CHART_MARGIN)
    full = CHART_ROWS * (len(BLOCKS) - 1)
    levels = [max(round(action / max(policy) * full), int(action > 0)) for action in policy[:count]]
    lines = []
    for row in reversed(range(CHART_ROWS)):
        bars = "".join(BLOCKS[min(max(level - row * (len(BLOCKS) - 1), 0), len(BLOCKS) - 1)] for level in levels)
        label = f"{max(policy)}" if row == CHART_ROWS - 1 else "0" if row == 0 else ""
        lines.append(f"{label:>{CHART_MARGIN - 2}} {bars}".rstrip())
    ticks = "".join(f"{state:<{AXIS_STEP}}" for state in range(0, count, AXIS_STEP))
    lines.append(" " * (CHART_MARGIN - 1) + ticks.rstrip())
    return lines if count == told else [*lines, f"cut: goes on to {told - 1}"]


def _told(policy: list[int]) -> int:
    """States that tell all: some more than until what is done in all later ones begins."""
    return min(policy.index(policy[-1]) + AXIS_STEP + 1, len(policy))


def print_answer(problem: Problem, answer: SolveReport, console: Console) -> None:
    console.print(_title(problem, answer), highlight=False)
    policies = [("", answer.policy)]
    if answer.other_policy is not None and answer.share is not None:
        policies = [
            (f"in {1 - answer.share:.1%} of the decisions", answer.policy),
            (f"in the other {answer.share:.1%}", answer.other_policy),
        ]
    for heading, policy in policies:
        table = Table("waiting", "do", title=heading or None, title_justify="left")
        for states, action in runs(policy):
            table.add_row(states, action)
        console.print(table)
        for line in chart(policy, console.width):
            console.print(line, highlight=False, markup=False)
    totals = Table(show_header=False)
    totals.add_column()
    totals.add_column(justify="right")
    for label, text in _totals(answer):
        totals.add_row(label, text)
    console.print(totals)


def _title(problem: Problem, answer: SolveReport) -> str:
    rate, weight = f"{answer.arrival_rate_per_s:,.6g} requests/s", f"energy weight {problem.weight:g} ms/W"
    if problem.latency_target_ms is not None:
        level = problem.latency_target_percentile
        what = "mean" if level is None else f"p{level:g}"
        missed = "" if answer.target_met else ": it cannot be met, this is the fastest"
        weight = f"least energy with {what} response time <= {problem.latency_target_ms:g} ms{missed}"
    batches = f"{problem.service} batches of {problem.batch_min} to {problem.batch_max}"
    if problem.is_basic:
        batches += " with the times and energies of SMDP-J's basic scenario"
    elif problem.profile is not None:
        batches += f" with the times and energies of {problem.profile}"
    return f"{batches}, load {answer.load:.4g} ({rate}), {weight}, solver {answer.solver}"


def _totals(answer: SolveReport) -> list[tuple[str, str]]:
    """What is not known has no row."""
    rows = [
        ("average cost (ms)", answer.average_cost, ".4f"),
        ("mean response time (ms)", answer.response_ms_mean, ".4f"),
        ("mean power (W)", answer.power_w_mean, ".4f"),
        ("mean batch", answer.batch_size_mean, ".2f"),
        ("utilisation", answer.utilisation, ".1%"),
        *((f"response time p{level} (ms)", getattr(answer, f"response_ms_p{level}"), ".3f") for level in LEVELS),
        ("iterations", answer.iterations, ","),
        ("solved in (ms)", answer.solve_ms, ".1f"),
    ]
    return [(label, format(value, form)) for label, value, form in rows if value is not None]


def plot(queue: Queue, decision: Decision, path: Path) -> None:
    """The policy; and, where the solver tells, how much more it costs to wait, or to serve, than to do the better.

    Raises ConfigError on a path that cannot be written or is of no kind of picture.
    """
    from matplotlib.figure import Figure

    panels = 1 if decision.values is None else 2
    figure = Figure(figsize=(7, 3.2 * panels), layout="constrained")
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    states = np.arange(_told(decision.policy.tolist()))
    axes[0].plot(states, np.minimum(states, queue.service.sizes[-1]), color="0.8", label="all that wait")
    axes[0].step(states, decision.policy[: states.size], where="mid", label="policy")
    if decision.other is not None:
        axes[0].step(states, decision.other[: states.size], where="mid", label=f"in {decision.share:.1%} of decisions")
    axes[0].set_ylabel("requests to serve")
    axes[0].legend()
    if decision.values is not None:
        wait, serve = decision.values[0, : states.size], decision.values[1:, : states.size].min(axis=0)
        axes[1].plot(states, wait - np.minimum(wait, serve), label="to wait")
        axes[1].plot(states, serve - np.minimum(wait, serve), label="to serve")
        axes[1].set_ylabel("costs more by (ms s)")
        axes[1].legend()
    axes[-1].set_xlabel("requests that wait")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: cannot draw {path}: {error}") from error
