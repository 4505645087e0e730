"""The page of Shepherd's figures: a text for each figure, with numbers from the rows."""

from __future__ import annotations

from collections.abc import Sequence

from papers.page import Reasons, Section, rows_of
from papers.rows import Row, Rows
from papers.shepherd import figures, load, micro, scaling, slo, table_5
from papers.shepherd.runs import (
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
from papers.shepherd.worlds import BURSTY, PART, SEEDS, STABLE, WITHIN

TITLE = "Shepherd, reproduced"

OPENING = f"""\
"SHEPHERD: Serving DNNs in the Wild" (Zhang, Tang, Khandelwal, Stoica, NSDI 2023): groups of GPUs serve several models.
The scheduler FLEX runs the largest batch that can be in time, and preempts far smaller batches for it. The measure is
goodput: requests a second that are answered in time.

How to read the numbers:

* Every simulation runs llmserve's own scheduler under a virtual clock, on 12 GPUs that run one batch at a time. A batch
  of b requests, at most 128, takes alpha b + beta with the coefficients of Table 4. Preemption and the network take no
  time.
* FLEX is order `flex`: every request of a batch is in time. "FLEX as printed" is the paper's Algorithm 2, which tests a
  deadline at the batch size before the request joins, so that some requests of a batch become late.
* The paper uses 13 of the 17 models without naming them; assumed here: the ResNets, ResNeSts and DenseNets. Functions
  call the models in turn, as in the paper. The SLO is 250 ms unless a section says otherwise.
* A run is the beginning of one minute of the trace, with a different minute for each seed, scaled to the rate: 3 s at
  3,000 requests a second, 1 s at 24,000, 0.55 s at 144,000. Answers in the first 0.3 s are not counted. The paper runs
  whole traces. Under overload the queues are full after one SLO; afterwards only the bursting models change.
* In the bursty trace each model bursts for 0.5 s on average, at ten times the rate, with 4.5 s between bursts. The
  paper does not print its own bursts.
* Numbers are means over {SEEDS} seeds (one seed for Fig. 9, 10 and 11 (b)), with 95 % confidence intervals in brackets:
  Student's, and leave-one-out for ratios. All policies get the same requests. "ok" means within {100 * WITHIN:.0f} %
  of a published ratio (10 % for Fig. 11 (a)), or within the confidence interval. The tolerance is wide because the
  paper does not print its workload, and describes each baseline in one sentence.
* The paper describes Clockwork as earliest deadline first, centralised, without preemption; and Nexus as a plan every
  60 s for the peak rates of the next 60 s. Both descriptions allow several readings, which are compared below. fffs and
  edf are llmserve's orders for engines with unknown batch times, with release greedy (greedy batching: as many requests
  as wait, up to 128, as soon as a GPU is free). They drop only requests whose deadline has passed."""

REASONS: Reasons = {
    load.FIGURE: {
        load.most_in_time(NEXUS): "The paper says this of the stable trace. In the bursty trace models burst at ten "
        "times the rate, and Nexus has a plan for a share of such peaks only.",
        load.under(NEXUS, BURSTY): "In this reading free slots take any waiting request of their model, and are full "
        "under overload. The other reading (Nexus, planned share) remains under it.",
    },
    load.READINGS: {
        load.RATIO: "The paper describes each baseline in one sentence. Other readings of the same sentences agree, or "
        "lie on the other side: the ratio to Clockwork as released is within tolerance of the printed one (stable), "
        "and the printed one to Nexus (bursty) lies between the ratios to Nexus and to Nexus, planned share.",
    },
    scaling.LIMITS: {
        scaling.OVER_ALONE: "The paper does not print the load. At the assumed one, single workers answer over 90 % of "
        "the requests in time, so that no groups could reach the printed ratio.",
        scaling.OVER_ONE: "One scheduler is limited by its processor core. In Python this limit is about a tenth of "
        "the paper's.",
    },
}

MADE_UP = (
    "**Without a trace** (`--trace FILE`): functions have synthetic, constant rates here, and few functions send most "
    "requests. The workloads keep the names MAF-stable and MAF-bursty."
)


def opening(rows: Rows, *, traced: bool) -> str:
    if traced:
        return OPENING + (
            "\n* The trace is a sample of 1,350 functions of the Azure Functions 2019 trace\n"
            "  (github.com/Azure/AzurePublicDataset); the paper uses all 46,000 functions."
        )
    return f"{OPENING}\n\n{MADE_UP}"


def _ratio(rows: Rows, trace: str, rate_per_s: float, policy: str) -> float:
    """Return FLEX's goodput over the policy's; inf if the policy has no goodput."""
    for name in (load.READINGS, load.FIGURE):
        for row in rows.of(name, load.RATIO, trace=trace, rate=rate_per_s, policy=policy):
            return row.measured or 0.0
    return float("inf")


def _rates(rows: Rows) -> list[float]:
    return sorted({float(row.case["rate"]) for row in rows.of(load.FIGURE, load.GOODPUT)})


def _range(values: Sequence[float], form: str) -> str:
    """Format the least and the greatest value."""
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
        f"At {high:,.0f} requests a second FLEX answers {goodput[STABLE]:,.0f} a second in time with the stable trace, "
        f"and {goodput[BURSTY]:,.0f} with the bursty trace. This is {gains[0]} times Clockwork's goodput, and "
        f"{gains[1]} times Nexus's, depending on the trace and the reading. The paper gives the reason: under "
        "overload, the earliest deadline that can still be met is about to pass, and a batch for it has little room. "
        f"At {over:,.0f} requests a second, bursty, FLEX's batches have {batches[FLEX]:.0f} requests on "
        f"average, Clockwork's {batches[CLOCKWORK]:.1f} (as described) and {batches[RELEASED]:.1f} (as released), and "
        f"Nexus's {batches[NEXUS]:.0f}. FLEX's goodput keeps rising beyond the capacity of 12 GPUs for all models, "
        "because FLEX then serves the fast models. At these loads preemption gains nothing (FLEX's goodput is "
        f"{_range(plain, '.2f')} times the goodput without preemption), because all batches are large. Preemption "
        "gains in Fig. 11 (a). Truly feasible batches serve "
        f"{_range(printed, '.2f')} times as much as batches as printed."
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
        "FLEX's gain depends on the reading of the baselines. The ratios in parentheses are FLEX's goodput over the "
        f"baseline's at {over:,.0f} requests a second, bursty. Clockwork as described: the earliest deadline that can "
        "be met goes next, with as many requests of its model as this deadline allows "
        f"({at[CLOCKWORK]}). Clockwork as released, after the authors' code: each model has batches of 1, 2, 4, 8 and "
        "16 that can be in time; the model whose batch must begin first goes next, with its largest batch "
        f"({at[RELEASED]}); with sizes up to 128, which nobody has published ({at[RELEASED_128]}). Clockwork, largest "
        "batch: the model with the earliest deadline goes next, with its largest feasible batch "
        f"({at[LARGEST]}); FLEX then gains only by the choice of the model. All these readings drop at once the "
        "requests that cannot be in time. Published ratios are 4.6 (stable) and 5.2 (bursty) at "
        f"{high:,.0f} requests a second; there the first two readings give {most[STABLE]} and {most[BURSTY]}. Without "
        "this dropping goodput is lost: edf drops only requests whose deadline has passed, and runs full batches of "
        f"requests that will be late ({at[EDF]}); so does fffs ({at[FFFS]}). If 12 GPUs do not suffice, Nexus plans "
        "for a share of all rates. If GPUs take requests from the whole queue of a model, slots are full under "
        f"overload ({at[NEXUS]}; {busy[NEXUS]:.0f} % utilisation at {high:,.0f}). If only the planned share is "
        "admitted, which is the paper's explanation of the low utilisation, GPUs idle between the planned peaks "
        f"({at[PLANNED_SHARE]}; {busy[PLANNED_SHARE]:.0f} %). Published ratios are 7.1 (stable) and 18.1 (bursty). The "
        "paper does not give the duration of a peak; here it is one second. Intervals are wide, because in so short a "
        "time the result depends mostly on the models that burst."
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
        "Latencies of requests in time, with the stable trace, at the lowest and the highest load. Shares of requests "
        f"that take over 200 of the 250 ms: at low load, {beyond['low']}; at high load, {beyond['high']}. FLEX fills a "
        "batch with the earliest deadlines that it can meet, so that FLEX's answers come close to the deadline, too; "
        "the latencies spread because full batches of different models take different times."
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
        f"{at[trace, RELEASED]:,.0f} with Clockwork as released, {at[trace, NEXUS]:,.0f} with Nexus, and "
        f"{at[trace, PLANNED_SHARE]:,.0f} with Nexus's planned share ({trace})"
        for trace in (STABLE, BURSTY)
    ]
    return (
        f"Goodput at 3,000 requests a second and an SLO of {1e3 * tight:g} ms: {'; '.join(texts)}. A single request to "
        "some models takes longer than a tight SLO (79 ms for ResNeSt269, 49 ms for ResNeSt200). Nexus needs an SLO of "
        "twice the time of a batch, and does not serve slower models at all. The published advantage over Nexus is up "
        "to 38 times, which means a Nexus that serves 79 requests a second."
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
        f"The load is {scaling.RATE_PER_WORKER_PER_S:g} requests a second for each worker. Streams are assigned to "
        "groups of 12 by HERD's load constraint: equal work for each GPU, and streams with more than "
        f"{100 * PART:.0f} % of a group's work are cut into parts. Each group has its own scheduler; groups are "
        f"independent, and simulated one after the other. Up to {most} workers, goodput per worker is {least_most} "
        "times the goodput per worker of one group of 12. The cost of a scheduler is the processor time of `handle`, "
        f"without the rest of a server: with 12 workers a step takes {median:.0f} µs (median; mean {mean:.0f}, because "
        f"the end of a batch ends all its requests), and one core decides on {first:,.0f} requests a second. With "
        f"{counts[-1]} workers it decides on {last:,.0f}, because FLEX considers each worker that is free or might be "
        f"preempted. {_saturates(rows, counts)} The paper's Clockwork, which is not written in Python, saturates at "
        "50,000 a second, with 200 workers. So groups of 12 workers, with a process for each group, make the system "
        "scale here, too. The dotted lines in Fig. 10, and the lines without a limit in Fig. 11 (b), are derived from "
        "these times: the load, up to the capacity of one core. Fig. 11 (b): groups of 12 have "
        f"{_range(over_alone, '.2f')} times the goodput of single workers (published: 1.7). Here streams are spread "
        "evenly over single workers, too; each worker then has few models with large batches, and loses less."
    )


def _saturates(rows: Rows, counts: Sequence[int]) -> str:
    over = [
        workers
        for workers in counts
        if rows.number(scaling.STEPS, scaling.CAPACITY, workers=workers, policy=FLEX)
        < scaling.RATE_PER_WORKER_PER_S * workers
    ]
    if not over:
        return "One core keeps up with all these loads."
    return f"The load of {over[0]} workers is the first of these loads that exceeds the capacity of one core."


def bursts(rows: Rows) -> str:
    loose, tight = (
        rows.number(micro.FIGURE, micro.RATIO, slo_s=slo_s, load=micro.STEADY, policy=CLOCKWORK)
        for slo_s in micro.SLOS_S
    )
    plain = rows.number(micro.FIGURE, micro.RATIO, slo_s=0.09, load=micro.STEADY, policy=WITHOUT_PREEMPTION)
    return (
        "One GPU; 1,024 requests to ResNet18 at 5, 125, 245, ... ms, and one request to ResNeSt269 every millisecond. "
        f"With an SLO of 250 ms, in the steady state, FLEX serves {loose:.2f} times as much as Clockwork as described, "
        "and hardly more than FLEX without preemption. With 90 ms the published ratio of 6.2 is the ratio of the first "
        "burst: with preemption two batches of 128 and a batch of 102 are in time; without preemption, the request to "
        "ResNeSt269 that began at 0, and 57 requests of the burst. In the steady state FLEX serves "
        f"{tight:.2f} times as much as Clockwork, and {plain:.2f} times as much as FLEX without preemption, because "
        "later bursts do not always come just after the start of a long request. Each published ratio is compared with "
        "the load that comes near it."
    )


def overloaded(rows: Rows) -> str:
    flex, plain, printed = (
        rows.number(micro.OVERLOAD, "goodput", policy=policy) for policy in (FLEX, WITHOUT_PREEMPTION, PRINTED)
    )
    late = rows.number(micro.OVERLOAD, "answered late", policy=PRINTED)
    return (
        "2 GPUs, the first six models of Table 4, 6,000 requests a second, 100 ms, Poisson arrivals, "
        f"{micro.OVERLOAD_SEEDS} seeds of {micro.OVERLOAD_REQUESTS / 6_000:g} s. FLEX answers {flex:,.0f} requests a "
        f"second in time, and {plain:,.0f} without preemption. With batches as printed FLEX answers {printed:,.0f} in "
        f"time and {late:,.0f} too late; late answers cost as much. This experiment is not in the paper: it shows why "
        "llmserve repairs Algorithm 2."
    )


def planner(rows: Rows) -> str:
    published = ", ".join(f"{seconds:g} s ({models:,})" for models, seconds in table_5.SOLVER_S.items())
    text = (
        f"The paper's solver takes {published} for as many models and workers, in 10 groups. "
        "scripts/lab/questions/herd/run.py measures llmserve's solver"
    )
    if rows.of(table_5.FIGURE):
        return text + (
            " on synthetic instances of these sizes, for [herd.md](../results/herd.md); the table has its medians. The "
            "times are not compared, because machines and instances differ from the paper's."
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
    """Select all counts, and the published ratios."""
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
