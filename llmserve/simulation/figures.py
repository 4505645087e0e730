"""Figures of simulated runs, as PNG files. The first figure loads matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmserve.errors import ConfigError
from llmserve.runtime.extras import need_plot
from llmserve.simulation.estimates import Estimate, Repeated
from llmserve.simulation.report import BatchRecorder, Start
from llmserve.simulation.scenario import SimulatedEngine
from llmserve.simulation.workload import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")  # Okabe and Ito, and a grey
MARKERS = "osD^vPX"
WAITS = "#DDDDDD"  # a slot whose answer is complete
STOPPED = "#D55E00"  # a slot whose batch was preempted: its work is lost
ENGINES_SHOWN, BATCHES_SHOWN, BATCHES_OF_ENGINE = 6, 60, 16  # limits of a timeline
PERCENTILES = (50, 95, 99)
LOGARITHMIC = 0.1  # the axis of latencies is logarithmic when the smallest is under this share of the largest

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Story:
    """A finished run, for its figures. label : name of the run in a figure of several runs."""

    label: str
    recorder: BatchRecorder
    trace: Trace
    engines: Sequence[SimulatedEngine]


def check(folder: Path) -> None:
    """Make the folder. Raises ConfigError without matplotlib, or when the folder cannot be made."""
    need_plot(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot: cannot make the folder {folder}: {error.strerror}") from error


def draw_run(folder: Path, stories: Sequence[Story]) -> list[Path]:
    """Write latency.png and waiting.png of the last story, and timeline.png of all stories, one below the other."""
    story = stories[-1]
    figures = [
        (folder / "latency.png", latency_figure(story)),
        (folder / "waiting.png", waiting_figure(story)),
        (folder / "timeline.png", timeline_figure(stories)),
    ]
    return [save(figure, path) for path, figure in figures if figure is not None]


def draw_comparison(folder: Path, cases: Sequence[Repeated]) -> list[Path]:
    """Write sweep.png."""
    return [save(comparison_figure(cases), folder / "sweep.png")]


def save(figure: Figure, path: Path) -> Path:
    """Write a figure. Raises ConfigError when the file cannot be written."""
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror}") from error
    return path


def _figure(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """width, height : inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e6e6e6", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def frontier_figure(points: Sequence[tuple[str, float, float]], p99_bound: float, title: str, *, chosen: int) -> Figure:
    """Mean latency against p99 latency, beside first come first served. points : (name, p99, mean).

    chosen : index of the point that is drawn large.
    """
    figure, (axes,) = _figure(1, 1, 7.0, 4.6)
    axes.axvspan(p99_bound, 10.0 * max(p99 for _, p99, _ in points), color="#f3f3f3", zorder=0)
    axes.axvline(p99_bound, color="#999999", linewidth=0.8, linestyle=":")
    for index, (name, p99, mean) in enumerate(points):
        big = index == chosen
        axes.plot(p99, mean, "o", color=COLOURS[1] if big else COLOURS[0], markersize=9 if big else 5)
        axes.annotate(name, (p99, mean), (6, 4), textcoords="offset points", size=7)
    p99s, means = [p99 for _, p99, _ in points], [mean for *_, mean in points]
    width = max(max(p99s) - min(p99s), 0.05)
    axes.set(
        xlim=(min(p99s) - 0.08 * width, max(*p99s, p99_bound) + 0.25 * width),
        ylim=(min(means) - 0.05, max(means) + 0.05),
        xlabel="p99 latency over first come first served",
        ylabel="mean latency over first come first served",
        title=title,
    )
    return figure


# ---- latencies --------------------------------------------------------------------------------------------------


def latency_figure(story: Story) -> Figure | None:
    """Distribution functions of latency and waiting: shares of the completed requests within so many seconds."""
    arrived, started, ended = _times(story.recorder)
    done = ~np.isnan(ended)
    if not done.any():
        return None
    figure, (axes,) = _figure(1, 1, 7.0, 4.4)
    shares = np.arange(1, done.sum() + 1) / done.sum()
    for name, values, colour, beside, side in (
        ("waiting: arrival to start", (started - arrived)[done], COLOURS[1], (-5, 4), "right"),
        ("latency: arrival to end", (ended - arrived)[done], COLOURS[0], (5, -11), "left"),
    ):
        axes.step(np.sort(values), shares, where="post", color=colour, label=name)
        for percent in PERCENTILES:
            at = float(np.percentile(values, percent))
            axes.plot(at, percent / 100, "o", color=colour, markersize=4)
            text = f"{at:.3g} s" if at < 1000 else f"{at:,.0f} s"
            axes.annotate(text, (at, percent / 100), beside, textcoords="offset points", color=colour, size=8, ha=side)
    for percent in PERCENTILES:
        axes.axhline(percent / 100, color="#999999", linewidth=0.6, linestyle=":")
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.95], ["0", "25 %", "50 %", "75 %", "95 %"])
    axes.set(ylim=(0, 1.04), xlabel="seconds", ylabel="share of requests", title="Latency and waiting")
    axes.set_xlim(0, 1.05 * max(float(np.percentile((ended - arrived)[done], 99.9)), 1e-12))
    axes.legend(frameon=False, loc="lower right")
    return figure


def _times(recorder: BatchRecorder) -> tuple[Floats, Floats, Floats]:
    return np.array(recorder.arrived_s), np.array(recorder.started_s), np.array(recorder.ended_s)


# ---- waiting by bin ---------------------------------------------------------------------------------------------


def waiting_figure(story: Story) -> Figure | None:
    """By bin, the mean wait for a batch and the mean wait for an engine, and the 95th percentile of their sum."""
    arrived = np.array(story.recorder.arrived_s)
    waits: dict[int, list[tuple[float, float, float]]] = {}  # by bin: (for a batch, for an engine, tokens) by request
    for start in story.recorder.starts:
        if start.batch_id in story.recorder.stopped_s:  # the requests of a preempted batch wait again
            continue
        for request_id in start.request_ids:
            batch_s = start.formed_s - arrived[request_id]
            tokens = story.trace.output_tokens[request_id]
            waits.setdefault(start.bin, []).append((batch_s, start.started_s - start.formed_s, tokens))
    if not waits:
        return None
    bins = sorted(waits)
    by_bin = [np.array(waits[index]) for index in bins]
    batch_s, engine_s = (np.array([rows[:, column].mean() for rows in by_bin]) for column in (0, 1))
    p95_s = [float(np.percentile(rows[:, 0] + rows[:, 1], 95)) for rows in by_bin]
    figure, (axes,) = _figure(1, 1, max(5.0, 2.0 + 0.75 * len(bins)), 4.2)
    places = np.arange(len(bins))
    axes.bar(places, batch_s, color=COLOURS[5], label="in its bin, for a batch")
    axes.bar(places, engine_s, bottom=batch_s, color=COLOURS[0], label="in a formed batch, for an engine")
    axes.plot(places, p95_s, "_", color="black", markersize=14, markeredgewidth=1.6, label="95th percentile of both")
    medians = [f"{index}\n{np.median(rows[:, 2]):.0f}" for index, rows in zip(bins, by_bin, strict=True)]
    axes.set_xticks(places, medians)
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="bin, and the median output tokens in it", ylabel="seconds", title="Mean waiting by bin")
    axes.set_ylim(0, 1.3 * max(*p95_s, 1e-9))
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    return figure


# ---- a timeline -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bars:
    """Uses of slots: (bars,) each. row : row in the figure.  tokens : length of the answer, which begins at begin_s and
    is complete at answered_s; the slot is free from free_s on.  stopped : 1 for a preempted request, otherwise 0.
    """

    row: Floats
    tokens: Floats
    begin_s: Floats
    answered_s: Floats
    free_s: Floats
    stopped: Floats

    @property
    def useful(self) -> float:
        """Share of the slots' time in which completed answers grew."""
        grew_s = (self.answered_s - self.begin_s)[self.stopped == 0]
        return float(grew_s.sum() / max((self.free_s - self.begin_s).sum(), 1e-12))


def timeline_figure(stories: Sequence[Story]) -> Figure | None:
    """The uses of the engines' slots from the first start on; the same interval of time for every story.

    Each request of a static batch has a row: coloured by its length while its answer grows, and grey while it waits for
    the longest answer of its batch. Bins reduce the grey time. Preempted batches have a colour of their own.
    """
    if not all(story.recorder.starts for story in stories):
        return None
    shown = stories[-1].engines[:ENGINES_SHOWN]
    begin_s = min(story.recorder.starts[0].started_s for story in stories)
    end_s = _end_of_timeline(stories[-1], shown)
    slots = sum(engine.info.slots for engine in shown)
    height = 1.3 + len(stories) * max(1.8, min(4.2, 0.11 * slots + 0.3))
    figure, axes = _figure(len(stories), 1, 12.0, height, sharex=True)
    tokens = np.sort(stories[-1].trace.output_tokens)
    barrier, any_stopped = shown[0].info.barrier, False
    for axis, story in zip(axes, stories, strict=True):
        bars = _bars(story, shown, begin_s, end_s)
        _draw_bars(axis, bars, np.searchsorted(tokens, bars.tokens) / tokens.size)
        any_stopped |= bool(bars.stopped.any())
        _name_engines(axis, story.engines[:ENGINES_SHOWN])
        useful = f": answers grow in {bars.useful:.0%} of the time that slots are in use" if barrier else ""
        axis.set_title(f"{story.label}{useful}", loc="left", fontsize=11)
        axis.set_xlim(begin_s, end_s)
    axes[-1].set_xlabel("seconds")
    _add_legend(figure, barrier, any_stopped)
    return figure


def _end_of_timeline(story: Story, shown: Sequence[SimulatedEngine]) -> float:
    """The end of the last batch in the timeline."""
    names = {engine.info.name for engine in shown}
    starts = [start for start in story.recorder.starts if start.engine in names]
    batches = min(BATCHES_SHOWN, BATCHES_OF_ENGINE * len(shown))
    if not shown[0].info.barrier:  # a start has few requests: take as many starts as fill the slots so often
        batches *= max(engine.info.slots for engine in shown) // 2 + 1
    ids = [request_id for start in starts[:batches] for request_id in start.request_ids]
    ended_s = np.array(story.recorder.ended_s)[ids]  # NaN for a preempted request that was never answered
    return float(np.nanmax(np.append(ended_s, starts[:batches][-1].started_s)))


def _bars(story: Story, shown: Sequence[SimulatedEngine], begin_s: float, end_s: float) -> _Bars:
    """The bars of all requests that run on these engines in this interval."""
    bases = np.cumsum([0, *(engine.info.slots + 1 for engine in shown)])
    engines = {engine.info.name: (engine, int(base)) for engine, base in zip(shown, bases, strict=False)}
    free_s = {name: [-np.inf] * engine.info.slots for name, (engine, _) in engines.items()}
    rows: list[tuple[float, ...]] = []
    for start in story.recorder.starts:
        if start.engine not in engines or start.started_s >= end_s:
            continue
        engine, base = engines[start.engine]
        stopped_s = story.recorder.stopped_s.get(start.batch_id)
        for slot, request_id, answered_s in _slots(story, start, engine, free_s[start.engine]):
            until_s = story.recorder.ended_s[request_id] if stopped_s is None else stopped_s
            if until_s > begin_s:
                tokens = float(story.trace.output_tokens[request_id])
                grown_s = min(answered_s, until_s)
                rows.append((base + slot, tokens, start.started_s, grown_s, until_s, stopped_s is not None))
    return _Bars(*np.array(rows, dtype=float).reshape(-1, 6).T)


def _slots(story: Story, start: Start, engine: SimulatedEngine, free_s: list[float]) -> list[tuple[int, int, float]]:
    """(slot, request id, end of the answer in s); a static batch has its longest answers first.

    free_s : when each slot is free; updated in place. The recorder knows engines, but no slots.
    """
    ended_s, tokens = story.recorder.ended_s, story.trace.output_tokens
    if engine.info.barrier:
        prompts = sum(story.trace.input_tokens[request_id] for request_id in start.request_ids)
        first_s = start.started_s + engine.costs.prefill_s + engine.costs.prefill_s_per_token * prompts
        step_s = engine.costs.step_s[len(start.request_ids)]
        ids = sorted(start.request_ids, key=lambda request_id: -tokens[request_id])
        return [(slot, id_, first_s + step_s * tokens[id_]) for slot, id_ in enumerate(ids)]
    placed = []
    for request_id in start.request_ids:
        slot = min(range(len(free_s)), key=lambda index: (free_s[index] > start.started_s, index))
        free_s[slot] = ended_s[request_id]
        placed.append((slot, request_id, ended_s[request_id]))
    return placed


def _draw_bars(axes: Axes, bars: _Bars, ranks: Floats) -> None:
    """ranks : (bars,) ranks of the answers by length among all answers, in [0, 1]."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    def boxes(left: Floats, right: Floats, **style: Any) -> None:
        low, high = bars.row + 0.04, bars.row + 0.96
        corners = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
        axes.add_collection(PolyCollection(list(corners), linewidths=0, **style))

    colours = _colours(ranks)
    colours[bars.stopped == 1] = to_rgba(STOPPED)
    boxes(bars.begin_s, bars.free_s, facecolors=WAITS)
    boxes(bars.begin_s, bars.answered_s, facecolors=colours)
    for at_s in np.unique(bars.begin_s):
        rows = bars.row[bars.begin_s == at_s]
        axes.plot([at_s, at_s], [rows.min(), rows.max() + 1], color="white", linewidth=0.8)
    axes.grid(visible=False)


def _colours(ranks: Floats) -> Floats:
    """(ranks, 4): red, green, blue and opacity."""
    from matplotlib import colormaps

    colours: Floats = colormaps["viridis_r"](0.08 + 0.86 * ranks)
    return colours


def _name_engines(axes: Axes, shown: Sequence[SimulatedEngine]) -> None:
    bases = np.cumsum([0, *(engine.info.slots + 1 for engine in shown)])
    middles = [float(base) + engine.info.slots / 2 for base, engine in zip(bases, shown, strict=False)]
    axes.set_yticks(middles, [engine.info.name for engine in shown])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(float(bases[-1]) - 0.7, -0.3)


def _add_legend(figure: Figure, barrier: bool, any_stopped: bool) -> None:
    from matplotlib.patches import Patch

    short, long = _colours(np.array([0.0, 1.0]))
    names = [Patch(color=short, label="a short answer grows"), Patch(color=long, label="a long answer grows")]
    if barrier:
        names.append(Patch(color=WAITS, label="a complete answer waits for the longest of its batch"))
    if any_stopped:
        names.append(Patch(color=STOPPED, label="preempted"))
    names.append(Patch(facecolor="white", edgecolor="#999999", linewidth=0.5, label="idle"))
    figure.legend(handles=names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)


# ---- comparisons ------------------------------------------------------------------------------------------------


def comparison_figure(cases: Sequence[Repeated]) -> Figure:
    """Throughput and latency against the first compared field, with a line for each value of the other fields. If all
    cases have deadlines: also the share of answers in time. The bands are 95 % confidence intervals.
    cases : in the order of the values, at least one.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    across, *other_fields = cases[0].settings
    lines: dict[str, list[Repeated]] = {}
    for case in cases:
        name = " ".join(f"{field.replace('_', '-')} {case.settings[field]}" for field in other_fields)
        lines.setdefault(name, []).append(case)
    values = list(dict.fromkeys(case.settings[across] for case in cases))
    places = _places(values)
    with_slo = all("in_time_share" in case.estimates for case in cases)
    figure, (throughput, latency, *in_time) = _figure(1, 3 if with_slo else 2, 15.5 if with_slo else 11.0, 4.4)
    for index, (name, line) in enumerate(lines.items()):
        x = [places[case.settings[across]] for case in line]
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 4}
        _line(throughput, x, [case.estimates["throughput_per_s"] for case in line], label=name, **style)
        _line(latency, x, [case.estimates["latency_s_mean"] for case in line], label=f"{name} mean".strip(), **style)
        p95 = [case.estimates["latency_s_p95"] for case in line]
        _line(latency, x, p95, label=f"{name} 95th percentile".strip(), linestyle="--", **style)
        for axes in in_time:
            _line(axes, x, [case.estimates["in_time_share"] for case in line], label=name, **style)
            axes.set(ylim=(0, 1.02))
    titles = ("Throughput, requests/s", "Latency, seconds", "Answered in time, share of requests")
    for axes, title in zip((throughput, latency, *in_time), titles, strict=False):
        axes.set(title=title, xlabel=across.replace("_", "-"))
        if any(not _is_number(value) for value in values):
            axes.set_xticks(list(places.values()), values)
    _from_zero(throughput, [case.estimates["throughput_per_s"] for case in cases])
    means, tails = ([case.estimates[name] for case in cases] for name in ("latency_s_mean", "latency_s_p95"))
    least, most = min(estimate.mean for estimate in means), max(estimate.mean for estimate in tails)
    if 0 < least < LOGARITHMIC * most:
        latency.set_yscale("log")
        latency.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        latency.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        latency.yaxis.set_minor_formatter(NullFormatter())
    else:
        _from_zero(latency, tails)
    latency.legend(frameon=False, fontsize=8)
    if other_fields:
        throughput.legend(frameon=False, fontsize=8)
    return figure


def _places(values: Sequence[str]) -> dict[str, float]:
    """The place of each value on the axis: the value itself, or its index when some value is no finite number."""
    if all(_is_number(value) for value in values):
        return {value: float(value) for value in values}
    return {value: float(index) for index, value in enumerate(values)}


def _is_number(value: str) -> bool:
    try:
        return bool(np.isfinite(float(value)))
    except ValueError:
        return False


def _from_zero(axes: Axes, estimates: Sequence[Estimate]) -> None:
    axes.set_ylim(0, 1.08 * max(*(estimate.mean + estimate.half_width for estimate in estimates), 1e-12))


def _line(axes: Axes, x: Sequence[float], estimates: Sequence[Estimate], **style: Any) -> None:
    axes.plot(x, [estimate.mean for estimate in estimates], **style)
    low, high = ([estimate.mean + side * estimate.half_width for estimate in estimates] for side in (-1, 1))
    axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
