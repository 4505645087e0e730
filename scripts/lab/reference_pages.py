"""Write the pages of all settings and all metrics from the code: docs/reference/settings.md and metrics.md.

    python scripts/lab/reference_pages.py           write the pages
    python scripts/lab/reference_pages.py --check   exit status 1 if a page differs from the code

tests/lab/test_reference_pages.py compares the pages, too.
"""

from __future__ import annotations

import argparse
import re
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client.core import Metric

from bins.dispatch import DispatchSolver, Objective, Observed
from bins.profile import resolve
from llmserve.forecasts.saving import Saver
from llmserve.forecasts.scheduler_state import scheduler_saving
from llmserve.forecasts.state_file import StateFile
from llmserve.live.driver import LiveCluster
from llmserve.live.journal import Header, Journal, Step
from llmserve.observe.counters import Families
from llmserve.observe.energy import ModelledEnergy
from llmserve.observe.metrics import Metrics
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import DispatchSolved, EngineReady, RequestArrived, SolveDispatch
from llmserve.settings.load import sections, takes
from llmserve.settings.policies import DEFAULTS, SchedulingConfig
from llmserve.settings.tree import COMMON, TITLES, Config
from llmserve.tenants.usage import KeyUsage

FOLDER = Path(__file__).resolve().parents[2] / "docs/reference"
PROFILE = "p4-googlenet"  # any profile with energy
MADE = "<!-- made by scripts/lab/reference_pages.py: change the code, not this page -->"


# ---- settings -----------------------------------------------------------------------------------------------------


def settings_page() -> str:
    lines = [
        "# Settings",
        MADE,
        "",
        "Each setting of `llmserve serve` is a flag (`--batch-size`), an environment variable (`LLMSERVE_BATCH_SIZE`) "
        "and a key of the TOML file that `--config` names (`[scheduling] batch_size`). Flags win over variables, and "
        "variables over the file. `llmserve serve --help` shows the settings in bold, `--help-all` shows all settings, "
        "and `--show-config` prints each value and its source.",
    ]
    lines += ["", "| defaults if | release | order | batch size |", "|---|---|---|---|"]
    lines += [f"| {kind} | {row.release} | {row.order} | {row.batch_size} |" for kind, row in DEFAULTS.items()]
    for name, struct in sections(Config).items():
        lines += ["", f"## [{name}]: {TITLES[name]}", "", "| setting | takes | default | |", "|---|---|---|---|"]
        hints = typing.get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            lines.append(_row(field.name, hints[field.name], field.default))
    return "\n".join(lines) + "\n"


def _row(name: str, hint: Any, default: Any) -> str:
    text = next((meta.description for meta in typing.get_args(hint)[1:] if meta.description), "")
    match = re.search(r" \(default:? ([^()]*)\)$", text)
    if match is not None:
        text, default_text = text[: match.start()], match[1]
    else:
        default_text = "none" if default is None or default == () else _value(default)
    cell = f"**{name}**" if name in COMMON else name
    return f"| {cell} | {takes(hint)} | {default_text} | {text} |"


def _value(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


# ---- metrics ------------------------------------------------------------------------------------------------------


def metrics_page() -> str:
    lines = [
        "# Metrics",
        MADE,
        "",
        "`GET /metrics` returns these metrics in Prometheus's text format. Counters end in `_total`; a histogram has "
        "`_bucket`, `_sum` and `_count`. With several models, metrics of bins also have the label `model`. Metrics of "
        "energy exist if energy can be measured or modelled (`profile`), metrics of plans if the release uses plans, "
        "metrics of the state with `--state`, and metrics of keys with `--api-key-file`.",
        "",
        "| metric | kind | labels | |",
        "|---|---|---|---|",
    ]
    for name, kind, labels, text in sorted(all_metrics()):
        lines.append(f"| `{name}` | {kind} | {', '.join(labels)} | {text} |")
    return "\n".join(lines) + "\n"


def all_metrics() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield (name, kind, labels, help) of every metric that a server may have."""
    metrics = _server_metrics()
    for counted in metrics.families:
        yield counted.full_name, counted.kind, counted.labels, counted.help
    for family in metrics.registry.collect():
        yield _full_name(family), family.type, tuple(getattr(family, "_labelnames", ())), family.documentation


def _full_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _server_metrics() -> Metrics:
    """Return the metrics of a server with a plan, energy, a state and a request, so that every metric exists."""
    scheduling = SchedulingConfig(release="table").resolved(barrier=True)
    header = Header(scheduling)
    profile = resolve(PROFILE)
    info = EngineInfo("engine", scheduling.full_batch, True)
    cluster = LiveCluster(header.scheduler(), [], Journal(header), clock=lambda: 0.0)
    saver = Saver(StateFile(FOLDER), lambda: scheduler_saving(cluster.scheduler, scheduling, {}))  # saves nothing
    families = Families()
    KeyUsage(lambda: cluster.models, families)
    metrics = Metrics(cluster, scheduling.full_batch, [ModelledEnergy({"": profile})], saver=saver, families=families)
    metrics.follow_server(SimpleNamespace(connections=set(), cut=Counter(), buffered_bytes=0))
    metrics.follow_jobs(SimpleNamespace(lines_waiting=0, lines_in_flight=0, lines_ended={}))
    cluster.scheduler.handle(EngineReady(info), 0.0)
    cluster.scheduler.handle(RequestArrived(Request(0, 100.0)), 0.0)
    observed = Observed(rates_per_s=(1.0,), lengths=((100.0,) * 64,), engines=1, slots=scheduling.full_batch, queues=0)
    solver = DispatchSolver(profile, scheduling.full_batch, Objective(0.0, 1.0, None), barrier=True, merges=True)
    metrics.observe(Step(0.0, DispatchSolved(solver.solve(observed)), [SolveDispatch(observed)]))
    return metrics


# ---- the command --------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """Return the texts by file name."""
    return {"settings.md": settings_page(), "metrics.md": metrics_page()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    stale = [name for name, text in pages().items() if not _is(FOLDER / name, text)]
    for name in stale:
        print(f"{FOLDER / name} {'differs from the code' if args.check else 'is written'}")
        if not args.check:
            FOLDER.mkdir(parents=True, exist_ok=True)
            (FOLDER / name).write_text(pages()[name])
    return 1 if stale and args.check else 0


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
