"""Write what the documents say by rote from the code: all settings, metrics and modules, and lists within other pages.

    python scripts/lab reference_pages           write the pages
    python scripts/lab reference_pages --check   exit status 1 if a page differs from the code

tests/lab/test_reference_pages.py compares the pages, too.
"""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from kit import ROOT
from prometheus_client import ProcessCollector

from llmserve.observe.readings import BINS_MIN
from llmserve.observe.table import TABLE
from llmserve.settings.load import sections, takes
from llmserve.settings.policies import DEFAULTS
from llmserve.settings.tree import COMMON, TITLES, Config
from make.lists import LISTS, modules_page, with_lists

MADE = "<!-- made by scripts/lab/make/reference_pages.py: change the code, not this page -->"


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
        "metrics of the state with `--state`, metrics of keys with `--api-key-file`, and metrics of relays with "
        "`--workers`.",
        "",
        "| metric | kind | labels | |",
        "|---|---|---|---|",
    ]
    for name, kind, labels, text in sorted(all_metrics()):
        lines.append(f"| `{name}` | {kind} | {', '.join(labels)} | {text} |")
    return "\n".join(lines) + "\n"


def all_metrics() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield (name, kind, labels, help) of every metric that a server may have."""
    for metric in TABLE:
        yield metric.full_name, metric.kind, metric.labels, metric.help.format(bins=BINS_MIN)
    for family in ProcessCollector(registry=None).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield name, family.type, (), family.documentation


# ---- the command --------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """The texts by path: whole pages, and pages with lists that follow from the code."""
    whole = {"settings": settings_page, "metrics": metrics_page, "modules": modules_page}
    texts = {f"docs/reference/{name}.md": page() for name, page in whole.items()}
    return texts | {path: with_lists((ROOT / path).read_text(), lists) for path, lists in LISTS.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    stale = {path: text for path, text in pages().items() if not _is(ROOT / path, text)}
    for path, text in stale.items():
        print(f"{path} {'differs from the code' if args.check else 'is written'}")
        if not args.check:
            (ROOT / path).write_text(text)
    return 1 if stale and args.check else 0


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text
