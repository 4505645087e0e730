"""Prints and draws the result of `llmserve solve`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bins.smdp import Queue
from llmserve.commands.solve import LEVELS, Decision, Problem, SolveReport
from llmserve.errors import ConfigError

BLOCKS = " ▁▂▃▄▅▆▇█"
CHART_ROWS, CHART_MARGIN, AXIS_STEP = 4, 6, 8


def runs(policy: list[int]) -> list[tuple[str, str]]:
    """Return (states, action) of each run of states with the same kind of action; the last run is unbounded."""
    largest = policy[-1]
    starts: list[tuple[int, str]] = []
    for state, action in enumerate(policy):
        kind = "wait" if action == 0 else "all" if action == state else "full" if action == largest else "some"
        if not starts or starts[-1][1] != kind:
            starts.append((state, kind))
    ends = [state - 1 for state, _ in starts[1:]]
    rows = []
    for (first, kind), end in zip(starts, [*ends, None], strict=True):
        states = f"{first}+" if end is None else f"{first}" if end == first else f"{first}..{end}"
        served = policy[first : None if end is None else end + 1]
        counts = f"{min(served)}" if min(served) == max(served) else f"{min(served)} to {max(served)}"
        words = {"wait": "wait", "all": "serve all that wait", "full": f"serve {largest}", "some": f"serve {counts}"}
        rows.append((states, words[kind]))
    return rows


def chart(policy: list[int], width: int) -> list[str]:
    """Return a bar chart of the action by state, CHART_ROWS lines high, with an axis; cut to `width` characters.

    A bar is blank only where no request is served.
    """
    shown = _shown_states(policy)
    count = min(shown, width - CHART_MARGIN)
    full = CHART_ROWS * (len(BLOCKS) - 1)
    levels = [max(round(action / max(policy) * full), int(action > 0)) for action in policy[:count]]
    lines = []
    for row in reversed(range(CHART_ROWS)):
        bars = "".join(BLOCKS[min(max(level - row * (len(BLOCKS) - 1), 0), len(BLOCKS) - 1)] for level in levels)
        label = f"{max(policy)}" if row == CHART_ROWS - 1 else "0" if row == 0 else ""
        lines.append(f"{label:>{CHART_MARGIN - 2}} {bars}".rstrip())
    ticks = "".join(f"{state:<{AXIS_STEP}}" for state in range(0, count, AXIS_STEP))
    lines.append(" " * (CHART_MARGIN - 1) + ticks.rstrip())
    return lines if count == shown else [*lines, f"cut: ends at {shown - 1}"]


def _shown_states(policy: list[int]) -> int:
    """Return how many states to show: a few more than until the policy becomes constant."""
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
        statistic = "mean" if level is None else f"p{level:g}"
        missed = "" if answer.target_met else ": the target cannot be met, this is the fastest policy"
        weight = f"least energy with {statistic} response time <= {problem.latency_target_ms:g} ms{missed}"
    batches = f"{problem.service} batches of {problem.batch_min} to {problem.batch_max}"
    if problem.is_basic:
        batches += " with the times and energies of SMDP-J's basic scenario"
    elif problem.profile is not None:
        batches += f" with the times and energies of {problem.profile}"
    return f"{batches}, load {answer.load:.4g} ({rate}), {weight}, solver {answer.solver}"


def _totals(answer: SolveReport) -> list[tuple[str, str]]:
    """Return (label, value) rows of the known totals."""
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
    """Draw the policy and, if known, the extra cost of waiting, or of serving, over the better action.

    Raises ConfigError on a path that cannot be written or has no known picture format.
    """
    from matplotlib.figure import Figure

    panels = 1 if decision.values is None else 2
    figure = Figure(figsize=(7, 3.2 * panels), layout="constrained")
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    states = np.arange(_shown_states(decision.policy.tolist()))
    axes[0].plot(states, np.minimum(states, queue.service.sizes[-1]), color="0.8", label="all waiting")
    axes[0].step(states, decision.policy[: states.size], where="mid", label="policy")
    if decision.other is not None:
        axes[0].step(states, decision.other[: states.size], where="mid", label=f"in {decision.share:.1%} of decisions")
    axes[0].set_ylabel("requests to serve")
    axes[0].legend()
    if decision.values is not None:
        wait, serve = decision.values[0, : states.size], decision.values[1:, : states.size].min(axis=0)
        axes[1].plot(states, wait - np.minimum(wait, serve), label="to wait")
        axes[1].plot(states, serve - np.minimum(wait, serve), label="to serve")
        axes[1].set_ylabel("extra cost (ms s)")
        axes[1].legend()
    axes[-1].set_xlabel("waiting requests")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: cannot draw {path}: {error}") from error
