"""How long HERD takes to plan, beside Shepherd's Table 5: up to 1,000,000 streams of 1,000 models on 1,000 GPUs.

    python scripts/lab herd --seeds 3 --output docs/results/herd.json --plot docs/results/herd.png

The paper gives only the numbers of streams, models, workers and groups (10). Here a model has the alpha and beta of a
model of Table 4, each changed by at most 20 %. Popularities of models are lognormal (sigma 1), and so are the rates of
a model's 1,000 streams. SLOs are 100, 250 or 500 ms, and 2 s for BERT-like models. The average load needs 70 % of the
GPUs, all models need 85 % of the memory of 10 groups, and a group has at most 15 % of the GPUs. "Tight" is harder: the
load needs 90 %, the models 95 %, and a group may have all GPUs.

"Read" is the time to read a JSON file of columns. "Plan" is the time from the instance in memory to the plan: it sums
streams, computes goodputs, searches, and levels loads. Prints Markdown tables: medians over seeds, but the largest gap.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from kit.arguments import numbers, parser_of
from kit.figures import new_figure, save
from kit.progress import log
from kit.rows import Row, group, median, read_rows, save_rows, select, values
from kit.tables import markdown
from papers.shepherd.models import TABLE_4
from papers.shepherd.table_5 import SOLVER_S

from llmserve.planning import TIME_LIMIT_S, Instance, Model, StreamColumns, needs_of, plan, streams_of

STREAMS_A_MODEL = 1_000
GROUPS, GPU_MEMORY_GB = 10, 16.0
SLOS_S = (0.1, 0.25, 0.5)
SLOW_ALPHA_MS, SLOW_SLO_S = 30.0, 2.0
KINDS = {"usual": (0.7, 0.85, 1.5 / GROUPS), "tight": (0.9, 0.95, 1.0)}  # load, memory, share of the GPUs in a group
FORMS = {"with load": False, "as printed": True}
CASE = ("kind", "models", "seed", "form")


def main() -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the processes that solve
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=numbers, default=tuple(SOLVER_S), metavar="N,N,...", help="models and GPUs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--time-limit-s", type=float, default=TIME_LIMIT_S)
    parser.add_argument("--results", type=Path, metavar="FILE", help="show an earlier --output; run nothing")
    parser.add_argument("--output", type=Path, help="JSON of every run")
    parser.add_argument("--plot", type=Path, help="PNG: seconds beside Table 5, and loads of groups")
    args = parser.parse_args()
    measured = measure(args.sizes, args.seeds, args.time_limit_s)
    rows = read_rows(args.results, CASE) if args.results else list(measured)
    print("\n\n".join(tables(rows)))
    save_rows(args.output, rows)
    if args.plot:
        draw(rows, args.plot)


# ---- a run --------------------------------------------------------------------------------------------------------


def measure(sizes: Sequence[int], seeds: int, time_limit_s: float) -> Iterable[Row]:
    cases = [("usual", size, seed) for size in sizes for seed in range(seeds)]
    cases += [("tight", size, seed) for size in (min(sizes), max(sizes)) for seed in range(seeds)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "instance.json"
        for number, (kind, size, seed) in enumerate(cases):
            make(kind, size, seed).save(path)
            began_s = time.perf_counter()
            instance = Instance.load(path)
            read_s = time.perf_counter() - began_s
            for form in FORMS:
                yield run(instance, kind, seed, form, read_s, time_limit_s)
            log(f"{number + 1} of {len(cases)}: {kind}, {size} models, seed {seed}")


def run(instance: Instance, kind: str, seed: int, form: str, read_s: float, time_limit_s: float) -> Row:
    began_s = time.perf_counter()
    planned = plan(instance, as_printed=FORMS[form], time_limit_s=time_limit_s)
    plan_s = time.perf_counter() - began_s
    assert planned.burst_tolerance is not None
    numbers = {
        "read_s": round(read_s, 3),
        "plan_s": round(plan_s, 3),
        "burst_tolerance": planned.burst_tolerance,
        "gap": planned.gap,
        "groups": len(planned.groups),
        "load_max": round(max(group.load for group in planned.groups), 4),  # over the GPUs of the group
    }
    return Row(dict(zip(CASE, (kind, len(instance.models), seed, form), strict=True)), numbers)


def make(kind: str, size: int, seed: int) -> Instance:
    """The instance that the module's docstring describes. size : number of models, and of GPUs"""
    load, memory, share = KINDS[kind]
    return drawn_instance(size, seed, load=load, memory=memory, groups=GROUPS, gpus_max=round(size * share))


def drawn_instance(
    size: int,
    seed: int,
    *,
    load: float,
    memory: float,
    groups: int,
    gpus_max: int,
    streams_a_model: int = STREAMS_A_MODEL,
) -> Instance:
    """size : number of models, and of GPUs.  load : share of the GPUs.  memory : share of the memory of all groups"""
    rng = np.random.default_rng(seed)
    names = [f"{name}-{number}" for number, name in zip(range(size), rng.choice(list(TABLE_4), size), strict=True)]
    drawn = [TABLE_4[name.rpartition("-")[0]] for name in names]
    times_ms = np.array([(model.alpha_ms, model.beta_ms) for model in drawn]) * rng.uniform(0.8, 1.2, (size, 2))
    memory_gb = rng.uniform(0.3, 1.7, size)
    memory_gb *= memory * groups * GPU_MEMORY_GB / memory_gb.sum()
    models = tuple(
        Model(name, *(float(value) for value in (model_gb, *model_ms)))
        for name, model_gb, model_ms in zip(names, memory_gb, times_ms, strict=True)
    )
    model_of = np.repeat(np.arange(size), streams_a_model)
    weight = rng.lognormal(0.0, 1.0, size)[model_of] * rng.lognormal(0.0, 1.0, model_of.size)
    slo_s = np.where(times_ms[model_of, 0] > SLOW_ALPHA_MS, SLOW_SLO_S, rng.choice(SLOS_S, model_of.size))
    streams = StreamColumns([f"s{k}" for k in range(model_of.size)], [names[k] for k in model_of], weight, slo_s)
    instance = Instance(streams, models, size, GPU_MEMORY_GB, gpus_max, groups)
    needed = float(needs_of(instance, streams_of(instance)).sum())
    scaled = StreamColumns(streams.name, streams.model, weight * (load * size / needed), slo_s)
    return Instance(scaled, models, size, GPU_MEMORY_GB, gpus_max, groups)


# ---- tables and the figure ----------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> list[str]:
    return [_table(own, kind) for kind in KINDS if (own := select(rows, kind=kind))]


def _table(rows: Sequence[Row], kind: str) -> str:
    head = ["streams", "models, GPUs", "published (s)", "read (s)"]
    head += [f"{form}: {column}" for form in FORMS for column in ("plan (s)", "gap", "most loaded group")]
    lines = []
    for (size,), of_size in sorted(group(rows, "models").items()):
        published = f"{SOLVER_S[size]:.2f}" if size in SOLVER_S else "-"
        cells = [f"{size * STREAMS_A_MODEL:,}", f"{size:,}", published, f"{median(of_size, 'read_s'):.2f}"]
        for form in FORMS:
            same = select(of_size, form=form)
            gap, load_max = max(values(same, "gap")), max(values(same, "load_max"))
            cells += [f"{median(same, 'plan_s'):.2f}", "0" if gap == 0 else f"{gap:.2%}", f"{load_max:.0%}"]
        lines.append(cells)
    return markdown(head, lines, title=kind)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Usual instances: seconds on the left, the most loaded groups on the right."""
    figure, ((seconds, loads),) = new_figure(1, 2, width=10, height=3.8)
    seconds.plot(list(SOLVER_S), list(SOLVER_S.values()), "o--", color="#9a9a9a", label="Table 5")
    for form, colour in zip(FORMS, ("#0072b2", "#d55e00"), strict=True):
        by_size = dict(sorted(group(select(rows, kind="usual", form=form), "models").items()))
        sizes, groups = [size for (size,) in by_size], by_size.values()
        seconds.plot(sizes, [median(same, "plan_s") for same in groups], "o-", color=colour, label=f"here, {form}")
        loads.plot(sizes, [max(values(same, "load_max")) for same in groups], "o-", color=colour, label=form)
    loads.axhline(1.0, color="#333333", linewidth=0.8)
    seconds.set(xlabel="models, GPUs and thousands of streams", ylabel="seconds to a plan", ylim=(0, None))
    loads.set(xlabel="models, GPUs and thousands of streams", ylabel="load of the most loaded group", ylim=(0, None))
    for axis in (seconds, loads):
        axis.legend()
    save(figure, path, dpi=110)
