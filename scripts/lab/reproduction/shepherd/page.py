"""The page of Shepherd's figures: what each shows, in numbers taken from the rows."""

from __future__ import annotations

from collections.abc import Sequence

from reproduction.page import Section, rows_of
from reproduction.rows import Row, Rows
from reproduction.shepherd import figures, load, micro, scaling, slo, table_5
from reproduction.shepherd.runs import (
    CLOCKWORK,
    EDF,
    FFFS,
    FLEX,
    LARGEST,
    NEXUS,
    PLANNED_SHARE,
    PRINTED,
    RELEASED,
    RELEASED_128,
    WITHOUT_PREEMPTION,
)
from reproduction.shepherd.worlds import BURSTY, PART, SEEDS, STABLE, WITHIN

TITLE = "Shepherd, reproduced"

OPENING = f"""\
"SHEPHERD: Serving DNNs in the Wild" (Zhang, Tang, Khandelwal, Stoica, NSDI 2023): on groups of GPUs that serve several
models, FLEX runs the largest batch that can be in time, and stops far smaller ones for it. What counts is goodput:
answers in time.

How to read the numbers:

* Every simulation is llmserve's own scheduler under a virtual clock, on 12 GPUs that run one batch at a time, each as
  long as Table 4 says: alpha b + beta, at most 128 requests. Stopping a batch takes no time; nor does the network.
* FLEX is order `flex`, with batches that are truly feasible. "As printed" is the paper's Algorithm 2, which tests a
  deadline at the size of the batch before its request joins, and so runs batches of which some are late.
* Of the 17 models the paper uses 13, and does not say which: here the ResNets, ResNeSts and DenseNets. Functions ask
  them in turn, as in the paper; the SLO is 250 ms unless a section says otherwise.
* A run is the beginning of one minute of the trace, another for each seed, scaled to the rate: 3 s at 3,000 requests a
  second, 1 s at 24,000, 0.55 s at 144,000. What is answered in the first 0.3 s is not counted. The paper takes whole
  traces; under overload the queues are full after one SLO, and nothing changes but which models burst.
* In the bursty trace each model bursts for 0.5 s on average, with ten times the requests, and then does not for 4.5 s.
  The paper does not print its own bursts.
* Means over {SEEDS} seeds (one for Fig. 9, 10 and 11 (b)), with 95 % confidence intervals in brackets: Student's; of
  quotients, by leaving one seed out. All policies see the same requests. "ok" is within {100 * WITHIN:.0f} % of a
  published ratio (10 % for Fig. 11 (a)), for the paper's workload is not
  printed, and its baselines are described in a sentence each; or nearer than the interval, which for bursts is wide.
* Clockwork is described as earliest deadline first, centralised, without preemption; Nexus as a plan for 60 s, for the
  peaks in them. Both can be read in several ways, which stand side by side below. fffs and edf are what llmserve does
  where nobody tells how long batches take (release greedy: as many as there are, up to 128, as soon as a GPU is free;
  this is greedy batching): they drop only what is past its deadline."""

MADE_UP = (
    "**Without a trace** (`--trace FILE`): functions here have made-up rates that stay, a few of which bring most. "
    "MAF-stable and MAF-bursty are named so all the same."
)


def opening(rows: Rows, *, traced: bool) -> str:
    if traced:
        return OPENING + (
            "\n* The trace is a sample of 1,350 functions of the Azure Functions 2019 trace\n"
            "  (github.com/Azure/AzurePublicDataset); the paper has all 46,000."
        )
    return f"{OPENING}\n\n{MADE_UP}"


def _ratio(rows: Rows, trace: str, rate_per_s: float, policy: str) -> float:
    """FLEX's goodput over that of a policy; inf where that is none."""
    for name in (load.READINGS, load.FIGURE):
        for row in rows.of(name, load.RATIO, trace=trace, rate=rate_per_s, policy=policy):
            return row.measured or 0.0
    return float("inf")


def _rates(rows: Rows) -> list[float]:
    return sorted({float(row.case["rate"]) for row in rows.of(load.FIGURE, load.GOODPUT)})


def _range(values: Sequence[float], form: str) -> str:
    """The least and the most of them."""
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def against_load(rows: Rows) -> str:
    high, over = _rates(rows)[-1], load.all_per_s(_rates(rows))
    goodput = {
        trace: rows.number(load.FIGURE, load.GOODPUT, trace=trace, rate=high, policy=FLEX) for trace in (STABLE, BURSTY)
    }
    batches = {
        policy: rows.number(load.FIGURE, load.BATCH, trace=BURSTY, rate=over, policy=policy)
        for policy in (FLEX, CLOCKWORK, RELEASED, NEXUS)
    }
    plain, printed = (
        [_ratio(rows, trace, over, policy) for trace in (STABLE, BURSTY)] for policy in (WITHOUT_PREEMPTION, PRINTED)
    )
    gains = [
        _range([_ratio(rows, trace, high, policy) for trace in (STABLE, BURSTY) for policy in policies], ".1f")
        for policies in ((CLOCKWORK, RELEASED), (NEXUS, PLANNED_SHARE))
    ]
    return (
        f"At {high:,.0f} requests a second FLEX answers {goodput[STABLE]:,.0f} a second in time under the stable "
        f"trace, and {goodput[BURSTY]:,.0f} under the bursty one. That is {gains[0]} times what Clockwork does, and "
        f"{gains[1]} times what Nexus does, by trace and by reading. The reason is the paper's: whoever serves the "
        "earliest deadline that can still be met finds, under overload, one that is just about to pass, and little "
        f"fits into a batch with it. At {over:,.0f} requests a second, bursty, FLEX's batches are of "
        f"{batches[FLEX]:.0f} requests, Clockwork's of {batches[CLOCKWORK]:.1f} as described and "
        f"{batches[RELEASED]:.1f} as released, and Nexus's of {batches[NEXUS]:.0f}. FLEX's goodput goes on rising "
        "beyond what 12 GPUs can do for all models, because it then serves the fast ones. Under these loads preemption "
        f"gains nothing (FLEX serves {_range(plain, '.2f')} times what it does without): batches are large whoever has "
        f"just begun. Its use is in Fig. 11 (a). Over batches as printed true feasibility gains "
        f"{_range(printed, '.2f')} times."
    )


def different_readings(rows: Rows) -> str:
    high, over = _rates(rows)[-1], load.all_per_s(_rates(rows))
    at = {policy: f"{_ratio(rows, BURSTY, over, policy):.1f} times" for policy in (*load.READ, EDF, FFFS)}
    busy = {
        policy: 100 * rows.number(load.FIGURE, load.UTILISATION, trace=BURSTY, rate=high, policy=policy)
        for policy in (NEXUS, PLANNED_SHARE)
    }
    most = {
        trace: _range([_ratio(rows, trace, high, policy) for policy in (CLOCKWORK, RELEASED)], ".1f")
        for trace in (STABLE, BURSTY)
    }
    return (
        f"How much FLEX gains depends on what the others are taken to do. At {over:,.0f} requests a second, bursty. "
        "Clockwork as described: the request with the earliest deadline that can be met goes next, with as many of its "
        f"model as leave it in time ({at[CLOCKWORK]}). As released, after the authors' code: of each model, batches of "
        "1, 2, 4, 8 and 16 that can be in time; the model goes next whose batch must begin first, with its largest "
        f"({at[RELEASED]}); with sizes up to 128, which nobody has measured ({at[RELEASED_128]}). The largest feasible "
        f"batch of the model whose deadline is the earliest ({at[LARGEST]}): then only the choice of the model is left "
        "to gain from. All of these drop at once what cannot be in time. Published are 4.6 times (stable) and 5.2 "
        f"(bursty), at {high:,.0f} requests a second; there the first two readings come to {most[STABLE]} and "
        f"{most[BURSTY]} times. Without that dropping all is lost: edf, which drops only what is past its deadline, "
        f"runs full batches of what will be late ({at[EDF]}), and so does fffs ({at[FFFS]}). Nexus, where 12 "
        "GPUs do not suffice, plans for a share of all rates. If they take from a model's whole queue, slots are full "
        f"under overload ({at[NEXUS]}; {busy[NEXUS]:.0f} % of the time at work at {high:,.0f}). If only the planned "
        "share is admitted, which is how the paper explains its low utilisation, GPUs wait between the peaks that they "
        f"are planned for ({at[PLANNED_SHARE]}; {busy[PLANNED_SHARE]:.0f} %). Published are 7.1 (stable) and 18.1 "
        "times (bursty); how long a peak lasts is not: here a second. Intervals are wide: which models burst in so "
        "short a time matters more than anything else."
    )


def distributions(rows: Rows) -> str:
    policies = (FLEX, CLOCKWORK, RELEASED, NEXUS)
    beyond = {
        name: ", ".join(
            f"{100 * rows.number(load.LATENCIES, load.NEAR, load=name, policy=policy):.0f} % of {policy}"
            for policy in policies
        )
        for name in ("low", "high")
    }
    return (
        "Of requests in time only; the stable trace, at the lowest and the highest load. Over 200 of the 250 ms take, "
        f"at low load, {beyond['low']}; at high load, {beyond['high']}. FLEX's batches are of those with the earliest "
        "deadlines of all that the batch leaves in time, so that its answers, too, come late rather than early; but "
        "models differ in how long a full batch takes."
    )


def against_slo(rows: Rows) -> str:
    tight = min(float(row.case["slo_s"]) for row in rows.of(slo.FIGURE, slo.GOODPUT))
    at = {
        (trace, policy): rows.number(slo.FIGURE, slo.GOODPUT, trace=trace, slo_s=tight, policy=policy)
        for trace in (STABLE, BURSTY)
        for policy in slo.POLICIES
    }
    texts = [
        f"{at[trace, FLEX]:,.0f} with FLEX, {at[trace, CLOCKWORK]:,.0f} with Clockwork as described, "
        f"{at[trace, RELEASED]:,.0f} as released, {at[trace, NEXUS]:,.0f} with Nexus, and "
        f"{at[trace, PLANNED_SHARE]:,.0f} if it admits its planned share ({trace})"
        for trace in (STABLE, BURSTY)
    ]
    return (
        f"Of 3,000 requests a second there are in time, at {1e3 * tight:g} ms: {'; '.join(texts)}. Some models take "
        "longer alone than a tight SLO allows (a ResNeSt269 79 ms, a ResNeSt200 49), and Nexus needs twice a batch's "
        "time, so that it does not serve them at all. Published is an advantage of up to 38 times over Nexus: one that "
        "serves 79 requests a second."
    )


def scale(rows: Rows) -> str:
    most = max(int(row.case["workers"]) for row in rows.of(scaling.FIGURE, scaling.LINEARITY))
    least_most = _range([row.measured or 0.0 for row in rows.of(scaling.FIGURE, scaling.LINEARITY)], ".3f")
    counts = sorted({int(row.case["workers"]) for row in rows.of(scaling.STEPS, scaling.CAPACITY)})
    median, mean = (
        rows.number(scaling.STEPS, name, workers=12, policy=FLEX) for name in (scaling.MEDIAN, scaling.MEAN)
    )
    first, last = (
        rows.number(scaling.STEPS, scaling.CAPACITY, workers=workers, policy=FLEX)
        for workers in (counts[0], counts[-1])
    )
    over_alone = [rows.number(scaling.LIMITS, scaling.OVER_ALONE, trace=trace) for trace in (STABLE, BURSTY)]
    return (
        f"{scaling.RATE_PER_WORKER_PER_S:g} requests a second for each worker. Streams are dealt to groups of 12 as "
        "HERD's load constraint asks: as much work for each GPU, streams of more than "
        f"{100 * PART:.0f} % of a group's cut into parts. Each group has a scheduler of its own; as they know nothing "
        f"of each other, they are simulated one after the other. Up to {most} workers, goodput per worker is "
        f"{least_most} times that of 12. Of a scheduler, the processor time of `handle` is measured, and nothing else "
        f"of a server's work: for 12 workers a step takes {median:.0f} µs (median; mean {mean:.0f}, for a step that "
        f"ends a batch ends all its requests), and one core decides on {first:,.0f} requests a second; for "
        f"{counts[-1]} workers on {last:,.0f}, because FLEX looks at each worker that is free or might be stopped. "
        f"{_saturates(rows, counts)} The paper's Clockwork saturates at 50,000 a second, at 200 workers; it is "
        "not written in Python. So 12 workers in a group, and a process for each group, is what makes it scale "
        "here, too. Dotted in (a), and without a limit in (b): the load, or as much of it as one core decides on, "
        "derived from these times. Fig. 11 (b): groups of 12 serve "
        f"{_range(over_alone, '.2f')} times what workers alone do (published: 1.7). Streams are dealt evenly here even "
        "to single workers, each of which then has few models, and large batches of them: alone they lose less."
    )


def _saturates(rows: Rows, counts: Sequence[int]) -> str:
    over = [
        workers
        for workers in counts
        if rows.number(scaling.STEPS, scaling.CAPACITY, workers=workers, policy=FLEX)
        < scaling.RATE_PER_WORKER_PER_S * workers
    ]
    if not over:
        return "None of these loads is beyond it."
    return f"Of these loads that of {over[0]} workers is the first which one core does not keep up with."


def bursts(rows: Rows) -> str:
    loose, tight = (
        rows.number(micro.FIGURE, micro.RATIO, slo_s=slo_s, load=micro.STEADY, policy=CLOCKWORK)
        for slo_s in micro.SLOS_S
    )
    plain = rows.number(micro.FIGURE, micro.RATIO, slo_s=0.09, load=micro.STEADY, policy=WITHOUT_PREEMPTION)
    return (
        "One GPU; 1,024 requests to ResNet18 at 5, 125, 245, ... ms, and one to ResNeSt269 at every millisecond. At "
        f"250 ms in the steady state FLEX serves {loose:.2f} times what Clockwork as described does, and hardly more "
        "than without preemption. At 90 ms the published 6.2 is that of the first burst: with preemption two batches "
        "of 128 and one of 102 are in time; without, the request to ResNeSt269 that began at 0, and 57 of the burst. "
        f"In the steady state it is {tight:.2f} times Clockwork, and {plain:.2f} times FLEX without preemption: "
        "later bursts need not come just when a long request has begun. Published ratios stand beside the load that "
        "comes near them."
    )


def overloaded(rows: Rows) -> str:
    flex, plain, printed = (
        rows.number(micro.OVERLOAD, "goodput", policy=policy) for policy in (FLEX, WITHOUT_PREEMPTION, PRINTED)
    )
    late = rows.number(micro.OVERLOAD, "answered late", policy=PRINTED)
    return (
        "2 GPUs, the first six models of Table 4, 6,000 requests a second, 100 ms, Poisson arrivals, "
        f"{micro.OVERLOAD_SEEDS} seeds of {micro.OVERLOAD_REQUESTS / 6_000:g} s. FLEX answers {flex:,.0f} a second in "
        f"time, {plain:,.0f} without preemption; with batches as printed {printed:,.0f}, and {late:,.0f} too late, "
        "which cost as much. It is not in the paper: it is why Algorithm 2 is repaired here."
    )


def planner(rows: Rows) -> str:
    published = ", ".join(f"{seconds:g} s ({models:,})" for models, seconds in table_5.SOLVER_S.items())
    text = (
        f"The paper's solver takes {published} for so many models and workers, in 10 groups. That of llmserve is "
        "measured by scripts/lab/benchmark_herd.py"
    )
    if rows.of(table_5.FIGURE):
        return text + (
            ", on made-up instances of these sizes, for [herd.md](../results/herd.md); its medians are read from there."
            " The machines and instances are others than the paper's, and nothing is compared."
        )
    return text + "."


def _load_table(rows: Rows) -> Sequence[Row]:
    ratios = [row for row in rows.of(load.FIGURE, load.RATIO) if row.ok is None]
    return [*ratios, *(row for row in rows.of(load.FIGURE) if row.ok is not None)]


def _slo_table(rows: Rows) -> Sequence[Row]:
    return [row for row in rows.of(slo.FIGURE) if row.quantity != slo.GOODPUT]


def _scale_table(rows: Rows) -> Sequence[Row]:
    counts = {row.case["workers"] for row in rows.of(scaling.STEPS, scaling.CAPACITY)}
    ends = {min(counts), max(counts)}  # type: ignore[type-var]
    return [
        *rows.of(scaling.FIGURE, scaling.LINEARITY),
        *(row for row in rows.of(scaling.STEPS) if row.case["workers"] in ends or row.quantity == scaling.CAPACITY),
        *(row for row in rows.of(scaling.LIMITS) if row.quantity != scaling.GOODPUT),
    ]


def _bursts_table(rows: Rows) -> Sequence[Row]:
    """Counts of all, and the ratios that are published."""
    return [row for row in rows.of(micro.FIGURE) if row.quantity == micro.IN_TIME or row.ok is not None]


SECTIONS: Sequence[Section] = (
    Section("Fig. 7: goodput and utilisation against load", against_load, _load_table, ("fig7-load", figures.loads)),
    Section(
        "Readings of Clockwork and Nexus",
        different_readings,
        rows_of(load.READINGS),
        ("fig7-readings", figures.readings),
    ),
    Section("Fig. 8: latencies", distributions, rows_of(load.LATENCIES), ("fig8-latencies", figures.latencies)),
    Section("Fig. 9: goodput against the SLO", against_slo, _slo_table, ("fig9-slo", figures.slos)),
    Section("Fig. 10 and 11 (b): up to 400 workers", scale, _scale_table, ("fig10-fig11b-workers", figures.workers)),
    Section("Fig. 11 (a): bursts", bursts, _bursts_table, ("fig11a-bursts", figures.bursts)),
    Section("Overload: batches as printed", overloaded, rows_of(micro.OVERLOAD)),
    Section("Table 5: HERD's solver", planner, rows_of(table_5.FIGURE)),
)
