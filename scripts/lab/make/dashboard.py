"""Write the Grafana dashboard from the definitions of the metrics: deploy/monitoring/grafana/llmserve.json.

    python scripts/lab dashboard           write the dashboard
    python scripts/lab dashboard --check   exit status 1 if the file differs from the code

A query of an unknown metric, of a wrong kind or with a label that the metric has not, is an error here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kit import ROOT

from make.reference_pages import all_metrics

FILE = ROOT / "deploy/monitoring/grafana/llmserve.json"
DATA = {"type": "prometheus", "uid": "prometheus"}
SELECTED = '{job=~"$job"}'
WIDTH, HEIGHT, COLUMNS = 8, 7, 24


@dataclass(frozen=True)
class Query:
    """An expression of PromQL. legend : {{label}} stands for the value of a label"""

    expression: str
    legend: str
    metric: str


@dataclass(frozen=True)
class Panel:
    """A graph. unit : Grafana's name of the unit"""

    title: str
    unit: str
    queries: Sequence[Query]


@cache
def definitions() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Kind, labels and help of every metric, by name."""
    return {name: (kind, labels, text) for name, kind, labels, text in all_metrics()}


def _checked(metric: str, kinds: Sequence[str], by: Sequence[str]) -> None:
    kind, labels, _ = definitions()[metric]
    if kind not in kinds or not set(by) <= set(labels):
        raise ValueError(f"{metric} is a {kind} by {labels}, and not a {' or '.join(kinds)} by {tuple(by)}")


def quantiles(metric: str, *by: str, levels: Sequence[float] = (0.5, 0.95, 0.99)) -> list[Query]:
    """Quantiles of a histogram over the interval of the graph."""
    _checked(metric, ["histogram"], by)
    rates = f"sum by ({', '.join(['le', *by])}) (rate({metric}_bucket{SELECTED}[$__rate_interval]))"
    return [
        Query(f"histogram_quantile({level}, {rates})", " ".join([f"p{100 * level:g}", *map(_of, by)]), metric)
        for level in levels
    ]


def rate(metric: str, *by: str) -> list[Query]:
    """Increase of a counter per second."""
    _checked(metric, ["counter"], by)
    return [Query(_summed(f"rate({metric}{SELECTED}[$__rate_interval])", by), _legend(metric, by), metric)]


def share(metric: str, label: str, part: str, whole: Sequence[str], *by: str) -> list[Query]:
    """How much of a counter's increase has one value of a label, among that of several values."""
    _checked(metric, ["counter"], (label, *by))
    selected = [SELECTED.replace("}", f',{label}=~"{values}"}}') for values in (part, "|".join(whole))]
    parts = [_summed(f"rate({metric}{one}[$__rate_interval])", by) for one in selected]
    return [Query(" / ".join(parts), _legend(metric, by), metric)]


def value(metric: str, *by: str) -> list[Query]:
    """A gauge as it is, added up over other labels than `by`."""
    _checked(metric, ["gauge"], by)
    return [Query(_summed(f"{metric}{SELECTED}", by), _legend(metric, by), metric)]


def _summed(expression: str, by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum ({expression})"


def _of(label: str) -> str:
    return f"{{{{{label}}}}}"


def _legend(metric: str, by: Sequence[str]) -> str:
    return " ".join(map(_of, by)) or metric.removeprefix("llmserve_").removesuffix("_total").replace("_", " ")


def rows() -> dict[str, list[Panel]]:
    """The panels by the title of their row: what users notice first, then why."""
    return {
        "What users notice": [
            Panel("Time to first token", "s", quantiles("llmserve_time_to_first_token_seconds", "model")),
            Panel("Time between tokens", "s", quantiles("llmserve_time_between_tokens_seconds", "model")),
            Panel("Latency of whole answers", "s", quantiles("llmserve_latency_seconds", "model")),
            Panel("Requests by outcome", "reqps", rate("llmserve_requests_total", "outcome")),
            Panel("Refused or failed, by reason", "reqps", rate("llmserve_rejections_total", "reason")),
            Panel("Deadlines", "reqps", rate("llmserve_deadlines_total", "outcome")),
        ],
        "The queue": [
            Panel("Waiting requests", "short", [*value("llmserve_bin_requests"), *value("llmserve_formed_requests")]),
            Panel("Time in the queue", "s", quantiles("llmserve_waiting_seconds", "model")),
            Panel("Order in force", "short", value("llmserve_order", "settings")),
        ],
        "Engines": [
            Panel("Running requests", "short", value("llmserve_engine_running", "engine")),
            Panel("Slots", "short", value("llmserve_engine_slots", "engine")),
            Panel("Ready", "short", value("llmserve_engine_ready", "engine")),
            Panel("Output tokens", "short", rate("llmserve_output_tokens_total", "engine")),
            Panel("Prompt tokens", "short", rate("llmserve_prompt_tokens_total", "engine")),
            Panel(
                "Share of prompts in the cache",
                "percentunit",
                share("llmserve_prompt_tokens_total", "cached", "yes", ("yes", "no"), "engine"),
            ),
            Panel("Runs by outcome", "reqps", rate("llmserve_engine_requests_total", "engine", "outcome")),
            Panel("Retries", "reqps", rate("llmserve_retries_total", "engine", "outcome")),
            Panel("Open circuits", "short", value("llmserve_engine_circuit_open", "engine")),
            Panel("Losses", "short", rate("llmserve_engine_losses_total", "engine")),
        ],
        "Forecasts": [
            Panel("Rank correlation with real lengths", "short", value("llmserve_prediction_rank_correlation")),
            Panel("Predicted over actual", "short", quantiles("llmserve_predicted_over_actual_tokens")),
            Panel("What gave the forecasts", "reqps", rate("llmserve_prediction_forecasts_total", "source")),
            Panel("Actual output tokens", "short", quantiles("llmserve_actual_tokens")),
            Panel("Trusted", "short", value("llmserve_prediction_trusted")),
            Panel("Answers learnt", "reqps", rate("llmserve_prediction_learnt_answers_total")),
        ],
        "Keys": [
            Panel("Output tokens", "short", rate("llmserve_key_output_tokens_total", "key")),
            Panel("Refused", "reqps", rate("llmserve_key_refused_total", "key")),
            Panel("Slots in use", "short", rate("llmserve_key_slot_seconds_total", "key")),
        ],
        "Batch jobs": [
            Panel("Lines", "short", value("llmserve_job_lines", "state")),
            Panel("Lines with a result", "reqps", rate("llmserve_job_lines_ended_total", "outcome")),
        ],
        "Energy": [
            Panel("Power", "watt", rate("llmserve_energy_joules_total", "source")),
            Panel("Energy per output token", "joule", value("llmserve_energy_joules_per_output_token", "source")),
            Panel("Energy per request", "joule", value("llmserve_energy_joules_per_request", "source")),
        ],
        "The front-end": [
            Panel("Processor", "percentunit", rate("process_cpu_seconds_total")),
            Panel("Memory", "bytes", value("process_resident_memory_bytes")),
            Panel("Bytes in flight", "bytes", value("llmserve_buffered_bytes")),
            Panel("Connections", "short", value("llmserve_connections")),
            Panel("Connections cut", "short", rate("llmserve_connections_cut_total", "reason")),
            Panel("Version", "short", value("llmserve_build_info", "version")),
        ],
    }


def dashboard() -> dict[str, Any]:
    return {
        "uid": "llmserve",
        "title": "llmserve",
        "tags": ["llmserve"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "job",
                    "label": "job",
                    "type": "query",
                    "datasource": DATA,
                    "query": {"query": "label_values(llmserve_build_info, job)", "refId": "job"},
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                }
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    id_, top = 1, 0
    for title, panels in rows().items():
        yield {"id": id_, "type": "row", "title": title, "collapsed": False, "gridPos": _place(0, top, COLUMNS, 1)}
        id_, top = id_ + 1, top + 1
        for number, panel in enumerate(panels):
            line, column = divmod(number, COLUMNS // WIDTH)
            yield _graph(id_, panel, _place(WIDTH * column, top + HEIGHT * line, WIDTH, HEIGHT))
            id_ += 1
        top += HEIGHT * -(-len(panels) // (COLUMNS // WIDTH))


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _graph(id_: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    texts = dict.fromkeys(definitions()[query.metric][2] for query in panel.queries)
    return {
        "id": id_,
        "type": "timeseries",
        "title": panel.title,
        "description": ". ".join(texts),
        "datasource": DATA,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATA,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    stale = not FILE.exists() or FILE.read_text() != text()
    if stale:
        print(f"{FILE} {'differs from the code' if args.check else 'is written'}")
        if not args.check:
            FILE.parent.mkdir(parents=True, exist_ok=True)
            FILE.write_text(text())
    return int(stale and args.check)
