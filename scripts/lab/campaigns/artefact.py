"""Remakes every table and figure of the papers' pages, in about an hour on two cores, and says what agrees.

    scripts/artefact                                  # into the folder artefact/; installs what it needs
    scripts/artefact --quick                          # five minutes: fewer samples and cases
    scripts/artefact --only smdp batchmonitor
    scripts/artefact --gsm8k FILE --trace FILE        # with data that is not part of the repository, see below

Run nothing else meanwhile: multibin-engines measures a real engine. Nothing needs a GPU. A run that was stopped goes on
where it was; --again begins anew. artefact/README.md then has how long each part took, how many numbers agree with the
paper, and which of them differ from those of docs/.

--gsm8k   answers to GSM8K as JSON lines with `output_tokens`, for Fig. 6 of Multi-Bin; without: Fig. 6 is left out
--trace   function calls a minute: a day of AzureFunctionsDataset2019 (github.com/Azure/AzurePublicDataset), for
          Shepherd; without: synthetic traffic
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kit import ROOT
from kit.arguments import parser_of
from kit.progress import log
from kit.tables import markdown
from papers.page import About
from papers.rows import Row, Rows

PARTS = ("smdp", "batchmonitor", "shepherd", "multibin", "multibin-engines", "algorithms")
FILES = {"gsm8k": "multibin", "trace": "shepherd"}  # flag -> the part that takes the file
QUICK_S = 60.0
ALGORITHMS_S = 60.0
NEAR = 0.01  # relative: simulations with the same seed are equal, measured times are not


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the artefact. command : its words.  expected_s : how long it took when docs/ was made"""

    name: str
    command: list[str]
    expected_s: float


def parts(args: argparse.Namespace) -> list[Part]:
    found = []
    for name in args.only or PARTS:
        if name == "algorithms":
            found.append(Part(name, [sys.executable, "scripts/lab", "algorithm_pages", "--check"], ALGORITHMS_S))
            continue
        words = [sys.executable, "scripts/reproduce.py", name, "--output-folder", str(args.output_folder)]
        words += ["--quick"] if args.quick else []
        for flag, taker in FILES.items():
            if (file := getattr(args, flag)) is not None and taker == name:
                words += [f"--{flag}", str(file)]
        found.append(Part(name, words, QUICK_S if args.quick else committed_s(name)))
    return found


def committed_s(name: str) -> float:
    return About.read((ROOT / "docs" / "papers" / f"{name}.md").read_text(encoding="utf-8")).seconds


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Done:
    """A part that has run. command : without the interpreter.  ok : whether it ended well"""

    command: list[str]
    seconds: float
    ok: bool


def run_all(todo: Sequence[Part], folder: Path, *, again: bool) -> dict[str, Done]:
    """Run the parts that have not run with the same command, and keep in `folder` what has."""
    log_file = folder / "done.json"
    done = {} if again or not log_file.exists() else {
        name: Done(**record) for name, record in json.loads(log_file.read_text(encoding="utf-8")).items()
    }  # fmt: skip
    left = [part for part in todo if not is_done(done.get(part.name), part)]
    for part in todo:
        if part not in left:
            log(f"{part.name}: done before, in {minutes(done[part.name].seconds)}")
    for place, part in enumerate(left):
        rest_s = sum(other.expected_s for other in left[place:])
        log(f"{part.name}: {place + 1} of {len(left)}, about {minutes(part.expected_s)}; all about {minutes(rest_s)}")
        began_s = time.perf_counter()
        status = subprocess.run(part.command, cwd=ROOT).returncode
        done[part.name] = Done(part.command[1:], time.perf_counter() - began_s, status == 0)
        log_file.write_text(
            json.dumps(
                {name: {slot: getattr(one, slot) for slot in Done.__slots__} for name, one in done.items()}, indent=1
            )
        )
    return {part.name: done[part.name] for part in todo}


def is_done(before: Done | None, part: Part) -> bool:
    return before is not None and before.ok and before.command == part.command[1:]


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# ---- what came out ---------------------------------------------------------------------------------------------------


def summary(done: dict[str, Done], folder: Path, *, quick: bool) -> str:
    """What the run has made, as Markdown."""
    table, off = [], []
    for name, one in done.items():
        results = folder / "results" / f"{name}.json"
        if not one.ok:
            table.append([name, minutes(one.seconds), "**failed**", ""])
        elif name == "algorithms":
            table.append([name, minutes(one.seconds), "every line and every printed number is that of the pages", ""])
        else:
            rows = Rows.read(results)
            agree = ", ".join(f"{good} of {all_} {kind}" for kind, (good, all_) in rows.counts().items())
            near, common, differing = beside(rows, Rows.read(ROOT / "docs" / "results" / f"{name}.json"))
            table.append(
                [f"[{name}](papers/{name}.md)", minutes(one.seconds), agree, "" if quick else f"{near} of {common}"]
            )
            off += [f"* {name}: {text}" for text in differing]
    lines = [
        "# The papers' tables and figures, remade",
        "",
        f"In {minutes(sum(one.seconds for one in done.values()))}{', a quick run with few samples' if quick else ''}.",
        "",
        markdown(["part", "took", "agree with the paper", f"within {NEAR:.0%} of docs/"], table),
    ]
    if off and not quick:
        lines += [
            "",
            "These numbers differ from those of docs/; of measured times and other files of data that is expected:",
        ]
        lines += ["", *off]
    return "\n".join(lines) + "\n"


def beside(made: Rows, before: Rows) -> tuple[int, int, list[str]]:
    """(numbers that are near those of before, numbers of both, the others in words)."""

    def key(row: Row) -> tuple[str, str, str]:
        return row.figure, row.case_text, row.quantity

    old = {key(row): row.measured for row in before.rows if row.measured is not None}
    both = [(row, old[key(row)]) for row in made.rows if row.measured is not None and key(row) in old]
    off = [(row, value) for row, value in both if abs((row.measured or 0.0) - value) > NEAR * abs(value)]
    words = [f"{', '.join(key(row))}: {row.measured:.6g} for {value:.6g}" for row, value in off]
    return len(both) - len(off), len(both), words


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples: at most a minute of processor time each")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help="answers to GSM8K")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="function calls a minute")
    parser.add_argument("--output-folder", type=Path, default=Path("artefact"), metavar="FOLDER")
    parser.add_argument("--again", action="store_true", help="run every part, also those that have run")
    args = parser.parse_args()
    args.output_folder = args.output_folder.resolve()
    args.output_folder.mkdir(parents=True, exist_ok=True)
    done = run_all(parts(args), args.output_folder, again=args.again)
    page = args.output_folder / "README.md"
    page.write_text(summary(done, args.output_folder, quick=args.quick), encoding="utf-8")
    print(page.read_text(encoding="utf-8"))
    return 0 if all(one.ok for one in done.values()) else 1
