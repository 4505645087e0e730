"""The figures of the SMDP papers, drawn from the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import matplotlib

matplotlib.use("Agg")

import numpy as np
from kit.figures import finish, log_ticks, new_figure
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from papers.rows import Rows
from papers.smdp.latencies import BOUND_MS
from papers.smdp.policies import CASE_LOADS, CASE_WEIGHTS, EIGHT
from papers.smdp.scenarios import (
    BATCH_MAX,
    BENCHMARKS,
    DISTRIBUTIONS,
    Array,
    Scenario,
    affine_ms,
    basic,
    constant_time,
    logarithmic_energy,
)
from papers.smdp.truncation import OVERFLOW_COSTS
from papers.style import COLOURS, LABELS, MARKERS

RESPONSE, POWER, COST = "mean response time W", "mean power P", "average cost g"
SIZES = np.arange(1, BATCH_MAX + 1)
OTHER_COLOURS = ("#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#7f3c8d")  # of curves that are no policies


def policies(rows: Rows, figure: str, cases: Iterable[int]) -> Figure:
    """A row of charts for each case, a chart for each w2: loads by states, with the number of requests served."""
    cases = tuple(cases)
    drawn, axes = new_figure(len(cases), len(CASE_WEIGHTS), width=14, height=1.75 * len(cases) + 0.5)
    for row, case in enumerate(cases):
        for column, weight in enumerate(CASE_WEIGHTS):
            axis = axes[row, column]
            served = [rows.curve(figure, "requests served", Case=case, w2=weight, rho=load) for load in CASE_LOADS]
            _chart(axis, np.array([curve.values for curve in served]), 8)
            axis.set_title(f"Case {case}, $w_2$ = {weight:g}", fontsize=9)
            if column == 0:
                axis.set_ylabel("load ρ")
            if row == len(cases) - 1:
                axis.set_xlabel("requests waiting s")
    return finish(drawn)


def _chart(axis: Axes, served: np.ndarray, batch_max: int, *, numbers: bool = True) -> None:
    """Draw served : (loads, states). A box marks the control limit: the least state that is served.

    Red numbers differ from the control limit's policy, which serves 0 below the limit, and all that fit from it on.
    """
    limits = (served > 0).argmax(axis=1)
    states = np.arange(served.shape[1])
    fitting = np.where(states < limits[:, None], 0, np.minimum(states, batch_max))
    shades = ListedColormap(["#f2f2f2", *(colormaps["Blues"](np.linspace(0.2, 0.75, batch_max)))])
    axis.imshow(served, cmap=shades, vmin=0, vmax=batch_max, aspect="auto", origin="lower")
    for (load, state), action in np.ndenumerate(served):
        odd = action != fitting[load, state]
        if numbers or odd:
            axis.text(
                state,
                load,
                f"{action:.0f}",
                ha="center",
                va="center",
                fontsize=7 if numbers else 5,
                color="#d4006a" if odd else "white" if action > 0.75 * batch_max else "black",
                fontweight="bold" if odd else "normal",
                in_layout=False,  # measuring each text would take seconds
            )
    for load, limit in enumerate(limits):
        axis.add_patch(_box(limit, load))
    axis.set_yticks(range(len(CASE_LOADS)), [f"{load:g}" for load in CASE_LOADS])
    axis.set_xticks(states[:: 4 if numbers else 8])
    axis.grid(visible=False)


def _box(state: int, load: int) -> matplotlib.patches.Rectangle:
    return matplotlib.patches.Rectangle((state - 0.5, load - 0.5), 1, 1, fill=False, edgecolor="#d4006a", linewidth=1.2)


def conference_policies(rows: Rows) -> Figure:
    figure = "SMDP-C Fig. 4"
    weights = sorted({float(row.case["w2"]) for row in rows.of(figure, "least state served")})
    drawn, axes = new_figure(2, 2, width=13, height=5)
    for axis, weight in zip(axes.flat, weights, strict=True):
        served = [rows.curve(figure, "requests served", w2=weight, rho=load) for load in CASE_LOADS]
        _chart(axis, np.array([curve.values for curve in served]), 32, numbers=False)
        axis.set(title=f"$w_2$ = {weight:g}", xlabel="requests waiting s", ylabel="load ρ")
    return finish(drawn)


def costs(rows: Rows, figure: str) -> Figure:
    """Above: the costs. Below: their excess over the SMDP policy's cost."""
    drawn, axes = new_figure(2, 3, width=13, height=6.4)
    for column, load in enumerate((0.1, 0.3, 0.7)):
        least = np.array(rows.curve(figure, COST, rho=load, policy="smdp").values)
        upper, lower = axes[:, column]
        for name in (*BENCHMARKS, "smdp"):
            curve = rows.curve(figure, COST, rho=load, policy=name)
            width = 2.4 if name == "smdp" else 1.4
            upper.plot(curve.at, curve.values, color=COLOURS[name], label=LABELS[name], linewidth=width)
            lower.plot(curve.at, 100 * (np.array(curve.values) / least - 1), color=COLOURS[name], linewidth=width)
        upper.set(title=f"ρ = {load:g}", ylim=(0, None))
        lower.set(xlabel="price of power $w_2$ (ms/W)", ylim=(-2, 60))
    axes[0, 0].set_ylabel("average cost g (ms)")
    axes[1, 0].set_ylabel("above SMDP (%)")
    axes[0, 0].legend()
    return finish(drawn)


def _tradeoffs(joules: Axes, efficiency: Axes, rows: Rows, figure: str, scenario: Scenario) -> None:
    """Draw (b) power and (c) requests per joule against the mean response time, for all loads."""
    _tradeoff(joules, rows, figure, lambda load, watts: watts)
    joules.set(title="(b) at loads ρ as labelled", ylabel="mean power P (W)")
    _tradeoff(efficiency, rows, figure, lambda load, watts: scenario.queue(load).arrival_rate_per_s / watts)
    efficiency.set(title="(c)", ylabel="requests per joule λ/P")


def _tradeoff(axis: Axes, rows: Rows, figure: str, measure: Callable[[float, float], float]) -> None:
    """measure : (load, watts) -> value on the y-axis"""
    loads = rows.curve(figure, RESPONSE, policy="greedy").at
    for load in loads:
        response = rows.curve(figure, RESPONSE, rho=load, policy="smdp")
        power = rows.curve(figure, POWER, rho=load, policy="smdp")
        y = [measure(load, watts) for watts in power.values]
        first = load == min(loads)
        axis.plot(
            response.values, y, color=COLOURS["smdp"], linewidth=1.3, label=LABELS["smdp"] if first else None, zorder=1
        )
        axis.annotate(
            f"{load:g}", (response.values[0], y[0]), xytext=(-5, 3), textcoords="offset points", fontsize=7, ha="right"
        )
    for name in BENCHMARKS:
        response = rows.curve(figure, RESPONSE, policy=name)
        power = rows.curve(figure, POWER, policy=name)
        y = [measure(load, watts) for load, watts in zip(response.at, power.values, strict=True)]
        axis.scatter(response.values, y, s=26, color=COLOURS[name], marker=MARKERS[name], label=LABELS[name], zorder=2)
    axis.set_xlabel("mean response time W (ms)")
    axis.margins(x=0.1)
    log_ticks(axis)


def tradeoffs(rows: Rows) -> Figure:
    """Fig. 5: (a) two loads, (b) all loads, (c) energy efficiency."""
    figure = "Fig. 5"
    drawn, ((axis, joules, efficiency),) = new_figure(1, 3, width=14, height=4.6)
    for load, shade in ((0.3, "#9b59b6"), (0.7, COLOURS["smdp"])):
        response = rows.curve(figure, RESPONSE, rho=load, policy="smdp")
        power = rows.curve(figure, POWER, rho=load, policy="smdp")
        axis.plot(response.values, power.values, "o-", color=shade, markersize=3, label=f"ρ = {load:g}")
    axis.set(title="(a) SMDP along $w_2$", xlabel="mean response time W (ms)", ylabel="mean power P (W)")
    axis.legend()
    _tradeoffs(joules, efficiency, rows, figure, basic())
    joules.legend(loc="center right")
    return finish(drawn)


def _variation(
    rows: Rows, figure: str, name: str, scenario: Scenario, curve: Callable[[Scenario], Array], **labels: str
) -> Figure:
    """Fig. 7 and 8: (a) the scenario's curve against batch size, and the basic scenario's; (b) and (c) trade-offs."""
    drawn, ((axis, joules, efficiency),) = new_figure(1, 3, width=14, height=4.6)
    for label, compared, colour in ((name, scenario, "#0072b2"), ("basic scenario", basic(), "#999999")):
        axis.plot(SIZES, curve(compared), color=colour, label=label)
    axis.set(xlabel="batch size b", **labels)
    axis.legend()
    _tradeoffs(joules, efficiency, rows, figure, scenario)
    joules.legend()
    return finish(drawn)


def constant_times(rows: Rows) -> Figure:
    labels = {"title": "(a) throughput of batches", "ylabel": "b / l(b) (requests/ms)"}
    return _variation(rows, "Fig. 7", "constant", constant_time(), lambda server: SIZES / server.service_ms, **labels)


def logarithmic_energies(rows: Rows) -> Figure:
    labels = {"title": "(a) energy of batches", "ylabel": "ζ(b) (mJ)"}
    return _variation(rows, "Fig. 8", "105 log b + 60", logarithmic_energy(), lambda server: server.energy_mj, **labels)


def latencies(rows: Rows) -> Figure:
    figure = "Fig. 6"
    drawn, axes = new_figure(1, 3, width=14, height=4.4)
    smdp = {"smdp w2=1.6": "-", "smdp w2=2.2": "--"}
    for name in (*BENCHMARKS, *smdp):
        curve = rows.curve(figure, "response time", policy=name)
        kind = name.split(" w2")[0]
        label = LABELS[kind] + (f", $w_2$ ={name.split('=')[1]}" if name in smdp else "")
        axes.flat[0].plot(curve.values, curve.at, smdp.get(name, "-"), color=COLOURS[kind], label=label, linewidth=1.5)
    axes.flat[0].set(
        title="(a) distribution at ρ = 0.7", xlabel="response time (ms)", ylabel="requests within it (%)", xlim=(0, 35)
    )
    axes.flat[0].legend(loc="lower right")
    bounds = (
        ("(b)", "95th percentile of the response time", "95th percentile of the response time (ms)", BOUND_MS),
        ("(c)", "within 10 ms", "responses within 10 ms (%)", 95.0),
    )
    for axis, (part, quantity, label, bound) in zip(axes.flat[1:], bounds, strict=True):
        along_w2 = [row for row in rows.of(figure, quantity) if "w2=" in str(row.case["policy"])]
        power = [rows.number(figure, POWER, policy=row.case["policy"]) for row in along_w2]
        axis.plot(
            [row.measured for row in along_w2], power, "o-", color=COLOURS["smdp"], markersize=4, label=LABELS["smdp"]
        )
        for name in BENCHMARKS:
            axis.plot(
                rows.number(figure, quantity, policy=name),
                rows.number(figure, POWER, policy=name),
                MARKERS[name],
                color=COLOURS[name],
                label=LABELS[name],
            )
        axis.axvline(bound, color="#555555", linewidth=0.8, linestyle=":")
        axis.set(title=part, xlabel=label, ylabel="mean power P (W)")
    axes.flat[1].legend()
    return finish(drawn)


def distributions(rows: Rows) -> Figure:
    """Fig. 9: (a) service times of a batch of 8, (b) trade-offs."""
    figure = "Fig. 9"
    drawn, axes = new_figure(1, 2, width=11, height=4.4)
    mean_ms = float(affine_ms(EIGHT)[-1])
    t = np.linspace(0.0, 5 * mean_ms, 400)
    for name, colour in zip(DISTRIBUTIONS, OTHER_COLOURS, strict=False):
        axes.flat[0].plot(t, 100 * _service_cdf(name, t / mean_ms), color=colour, label=name)
        for load, dash in ((0.3, "--"), (0.7, "-")):
            response = rows.curve(figure, RESPONSE, service=name, rho=load, policy="smdp")
            power = rows.curve(figure, POWER, service=name, rho=load, policy="smdp")
            axes.flat[1].plot(response.values, power.values, dash, color=colour, label=f"{name}, ρ = {load:g}")
            greedy = rows.curve(figure, RESPONSE, service=name, policy="greedy").value(load)
            watts = rows.curve(figure, POWER, service=name, policy="greedy").value(load)
            axes.flat[1].plot(greedy, watts, MARKERS["greedy"], color=colour)
    axes.flat[0].set(title="(a) service time of a batch of 8", xlabel="time (ms)", ylabel="batches within it (%)")
    axes.flat[1].set(
        title="(b) SMDP curves; triangles: greedy",
        xlabel="mean response time W (ms)",
        ylabel="mean power P (W)",
        xscale="log",
    )
    log_ticks(axes.flat[1])
    axes.flat[0].legend()
    axes.flat[1].legend()
    return finish(drawn)


def _service_cdf(name: str, x: np.ndarray) -> np.ndarray:
    """Return the distribution function of a service time with mean 1."""
    if name == "deterministic":
        return (x >= 1.0).astype(float)
    if name == "Erlang-2":
        return np.asarray(1.0 - (1.0 + 2.0 * x) * np.exp(-2.0 * x))
    if name == "exponential":
        return np.asarray(1.0 - np.exp(-x))
    return np.asarray(1.0 - (2.0 * np.exp(-2.0 * x) + np.exp(-x / 2.0)) / 3.0)


def truncations(rows: Rows) -> Figure:
    drawn, axes = new_figure(1, 2, width=11, height=4.2)
    for overflow_cost, colour in zip(OVERFLOW_COSTS, OTHER_COLOURS, strict=True):
        for axis, quantity in zip(axes.flat, (COST, "Delta"), strict=True):
            curve = rows.curve("Fig. 10", quantity, c_o=overflow_cost)
            axis.plot(curve.at, curve.values, color=colour, label=f"$c_o$ = {overflow_cost:g}")
    axes.flat[0].set(xlabel="$s_{max}$", ylabel="average cost g (ms)", ylim=(0, 120), title="average cost")
    axes.flat[1].set(xlabel="$s_{max}$", ylabel="Δ (ms)", yscale="log", title="part of it in the overflow state")
    axes.flat[1].axhline(1e-3, color="#555555", linewidth=0.8, linestyle=":")
    axes.flat[0].legend()
    return finish(drawn)


figure_3 = partial(policies, figure="Fig. 3", cases=(1, 2, 3))
figure_11 = partial(policies, figure="Fig. 11", cases=(4, 5, 6, 7))
figure_4 = partial(costs, figure="Fig. 4")
conference_costs = partial(costs, figure="SMDP-C Fig. 5")
