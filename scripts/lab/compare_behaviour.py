#!/usr/bin/env python
"""Whether two checkouts behave alike, byte for byte: what a user, a client and a scraper can see.

    git worktree add ../before COMMIT
    python scripts/lab/compare_behaviour.py ../before
    python scripts/lab/compare_behaviour.py ../before --only keys      # one arrangement of the server
    python scripts/lab/compare_behaviour.py ../before --only commands  # help, settings, failing starts, simulations

It compares the help of every command, `--show-config`, the generated settings page, the errors of starts that must
fail, the results of short simulations; and, of servers with several settings, the heads and bodies of good and bad
answers, the log, /metrics, /openapi.json and the journal. Each server has a timed engine of its own, which runs from
the first checkout. Times and drawn ids are masked (behaviour/masks.py names each mask). Each difference is printed, and
the exit status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from behaviour.arrangements import ARRANGEMENTS, Arrangement
from behaviour.asking import Asked, answer, ask
from behaviour.masks import masked, masked_journal

ROOT = Path(__file__).resolve().parents[2]
START_S, COMMAND_S = 60.0, 60.0
PAUSE_S = 0.004  # between two requests, so that what is learnt of an answer is learnt before the next
DIFFERENCE_LINES, LINE_CHARS = 12, 400  # of a difference that is printed
SIMULATIONS: dict[str, tuple[str, ...]] = {
    "the defaults": (),
    "edf with deadlines": ("--order", "edf", "--slo-s", "20"),
    "windows": ("--barrier", "--release", "window", "--engines", "2"),
    "bins": ("--barrier", "--release", "greedy", "--bins", "4", "--load", "0.8"),
    "flex": ("--barrier", "--order", "flex", "--slo-s", "5,50", "--profile", "p4-googlenet"),
}
WRONG_STARTS: dict[str, tuple[str, ...]] = {
    "no URL": ("--engine", "localhost:8001"),
    "twice": ("--engine", "http://a", "--engine", "http://a"),
    "twice, written differently": ("--engine", "http://a:80", "--engine", "http://a/v1"),
    "vllm without a model": ("--engine", "vllm"),
    "no model folder": ("--engine", "vllm", "--model", "/nowhere/model"),
    "own arguments of vLLM": ("--engine", "vllm", "--model", "m", "--", "--port", "1"),
    "no interpreter": ("--engine", "vllm", "--model", "m", "--engine-python", "/nowhere"),
    "replicas": ("--replicas", "2"),
    "vLLM's arguments": ("--", "--max-model-len", "1024"),
    "no file of admin keys": ("--admin-key-file", "/nowhere"),
    "no file of keys": ("--api-key-file", "/nowhere"),
    "no predictor": ("--predictor", "/nowhere"),
    "no predictor of a model": ("--predictor", "none", "--predictor", "model:m=/nowhere"),
    "half a predictor": ("--predictor", "model:m"),
    "two profiles": ("--profile", "p4-googlenet", "--profile", "h100-llama-3.1-8b"),
    "unknown profile": ("--profile", "p5-googlenet"),
    "worker of embedded": ("--engine", "gpu0=embedded"),
    "two workers": ("--engine", "gpu0=http://a", "--engine", "gpu1=http://a"),
    "deadline of nothing": ("--slo-ms", "streem:a=5"),
    "edges": ("--bins", "3", "--edges", "9,5", "--engine", "http://127.0.0.1:9"),
    "open to the network": ("--host", "0.0.0.0"),
    "misspelt": ("--batch-sise", "4"),
    "misspelt order": ("--order", "shortes"),
    "no number": ("--bins", "many"),
    "too small": ("--bins", "0"),
    "too large": ("--port", "70000"),
    "no file of settings": ("--config", "/nowhere.toml"),
    "bad file of settings": ("--config", "{folder}/bad.toml"),
    "unknown section": ("--config", "{folder}/section.toml"),
    "wrong type": ("--config", "{folder}/type.toml"),
    "unknown setting": ("--config", "{folder}/setting.toml"),
    "unknown field of a key": ("--api-key-file", "{folder}/keys.toml"),
    "keys twice": ("--api-key-file", "{folder}/keys"),
    "no plan": ("--plan", "/nowhere"),
    "bad plan": ("--plan", "{folder}/bad.toml"),
    "bad alias": ("--alias", "a"),
    "table without a profile": ("--release", "table", "--engine", "http://127.0.0.1:9"),
    "bad release": ("--release", "static:x"),
    "no origin": ("--cors-origin", "chat.example.com"),
    "no network": ("--trusted-proxy", "10.0.0.0/99"),
}
WRONG_FILES = {
    "bad.toml": "[server\n",
    "section.toml": "[servr]\nport = 1\n",
    "type.toml": '[server]\ndrain_s = "x"\n',
    "setting.toml": "[server]\ndrain_S = 1\n",
    "keys.toml": '[keys.a]\nkey = "k"\nwieght = 2\n',
    "keys": "a: k\nb: k\n",
}
SHOWN: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "refill": ("--engine", "http://127.0.0.1:9"),
    "flex": ("--order", "flex", "--barrier", "--engine", "http://127.0.0.1:9"),
    "many": ("--bins", "4", "--slo-ms", "5", "--alias", "a=b", "--port", "0", "--fair-by", "stream", "--state", "/s"),
}

Seen = dict[str, bytes]


class Checkout:
    """A checkout, whose code runs in the environment of this interpreter."""

    def __init__(self, name: str, place: Path) -> None:
        self.name, self.place = name, place
        kept = {key: value for key, value in os.environ.items() if not key.startswith("LLMSERVE_")}
        self.environment = {**kept, "PYTHONPATH": str(place), "COLUMNS": "100", "PYTHONHASHSEED": "0"}

    @property
    def engine(self) -> str:
        """The module of the timed engine, whose name has changed once."""
        is_new = (self.place / "llmserve/engines/timed").is_dir()
        return "llmserve.engines.timed" if is_new else "llmserve.engines.fake"

    def start(self, *words: str, output: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", *words]
        with output.open("wb") as file:
            return subprocess.Popen(command, cwd=output.parent, env=self.environment, stdout=file, stderr=file)

    def ran(self, folder: Path, *words: str) -> bytes:
        """Exit status, standard output and standard error of a command."""
        command = [sys.executable, "-m", *words]
        try:
            done = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, timeout=COMMAND_S)
        except subprocess.TimeoutExpired:
            return b"it has not ended"
        output = b"exit status %d\n%s\n%s" % (done.returncode, done.stdout, done.stderr)
        return masked(output, {str(folder): "FOLDER", str(self.place): "CHECKOUT"})


# ---- commands ------------------------------------------------------------------------------------------------------


def commands_of(checkout: Checkout, folder: Path) -> Seen:
    for name, text in WRONG_FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    ran = partial(checkout.ran, folder)
    whole = ran("llmserve", "--help")
    seen = {"help": whole, "no command": ran("llmserve"), "unknown command": ran("llmserve", "serv")}
    for command in re.findall(rb"(?m)^    (\w+)  ", whole):
        seen[f"help of {command.decode()}"] = ran("llmserve", command.decode(), "--help")
    for command in ("serve", "batch"):
        seen[f"all help of {command}"] = ran("llmserve", command, "--help-all")
    for name, flags in SHOWN.items():
        seen[f"settings: {name}"] = ran("llmserve", "serve", *flags, "--show-config")
    for name, flags in WRONG_STARTS.items():
        words = [word.replace("{folder}", str(folder)) for word in flags]
        seen[f"wrong start: {name}"] = ran("llmserve", "serve", "--port", "0", *words)
    for name, flags in SIMULATIONS.items():
        seen[f"simulation: {name}"] = ran("llmserve", "simulate", "--requests", "1500", "--seed", "3", "--json", *flags)
    seen["settings page"] = (checkout.place / "docs/reference/settings.md").read_bytes().split(b"-->", 1)[-1]
    return seen


# ---- servers -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(checkout: Checkout, words: tuple[str, ...], output: Path, ready: str) -> Iterator[str]:
    """The match of the expression `ready` in the output of a program that serves; it ends with the context."""
    process = checkout.start(*words, output=output)
    try:
        until_s = time.monotonic() + START_S
        while not (found := re.search(ready, output.read_text(encoding="utf-8"))):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{' '.join(words)} did not start:\n{output.read_text(encoding='utf-8')}")
            time.sleep(0.02)
        yield found[1]
    finally:
        process.terminate()
        process.wait(timeout=START_S)


def answers_of(checkout: Checkout, engines: Checkout, arrangement: Arrangement, folder: Path) -> Seen:
    """All answers of a server, then its metrics, its log and its journal."""
    for name, text in arrangement.files.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o600)
    flags = [flag.replace("{folder}", str(folder)) for flag in arrangement.flags]
    engine_words = (engines.engine, "--port", "0", "--slots", "4", "--step-s", "0", *arrangement.engine)
    seen: Seen = {}
    with started(engines, engine_words, folder / "engine.log", r"ready at (\S+)") as engine:
        words = ("llmserve", "serve", "--port", "0", "--engine", engine, "--predictor", "none", *flags)
        with started(checkout, words, folder / "server.log", r"llmserve is ready: (\S+)/v1") as url:
            port, engine_name = int(url.rpartition(":")[2]), engine.removeprefix("http://")
            places = {url.removeprefix("http://"): "SERVER", engine_name: "ENGINE", str(folder): "FOLDER"}
            places[engine_name.rpartition(":")[2]] = "ENGINE PORT"

            def send(asked: Asked) -> bytes:
                time.sleep(PAUSE_S)
                return answer(port, asked.data.replace(b"/ENGINE/", f"/{engine_name}/".encode()))

            for number, asked in enumerate(arrangement.asked()):
                seen[f"{number}: {asked.name}"] = masked(send(asked), places)
            if arrangement.then is not None:
                later = arrangement.then(send)
                seen |= {name: masked(data, places) for name, data in later.items()}
            key = {"authorization": "Bearer sk-admin"} if "admin" in arrangement.files else {}
            seen["/metrics"] = masked(send(ask("GET", "/metrics", **key)), places)
        log = masked((folder / "server.log").read_bytes(), places)
        # How often a batch is asked for until it ends is a matter of time.
        seen["log"] = b"\n".join([line for line in log.splitlines() if b"GET path=/v1/batches/<" not in line])
        if (journal := folder / "journal").exists():
            seen["journal"] = masked_journal(journal.read_bytes().splitlines(), places)
    return seen


# ---- comparing -----------------------------------------------------------------------------------------------------


def seen_by(checkout: Checkout, engines: Checkout, part: Arrangement | None) -> Seen:
    """part : None: the commands"""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        return commands_of(checkout, folder) if part is None else answers_of(checkout, engines, part, folder)


def difference(before: bytes, now: bytes) -> list[str]:
    sides = [text.decode(errors="backslashreplace").splitlines() for text in (before, now)]
    lines = list(difflib.unified_diff(*sides, "before", "now", lineterm="", n=0))
    for number, (line, other) in enumerate(itertools.pairwise(lines)):
        if line[:1] == "-" and other[:1] == "+" and len(line) > LINE_CHARS and len(other) > LINE_CHARS:
            same = next((n for n, (a, b) in enumerate(zip(line[1:], other[1:], strict=False)) if a != b), 0)
            lines[number : number + 2] = [f"{text[0]}...{text[1 + max(0, same - 60) :]}" for text in (line, other)]
    more = [f"... {len(lines) - DIFFERENCE_LINES} further lines"] if len(lines) > DIFFERENCE_LINES else []
    return [*[line[:LINE_CHARS] for line in lines[:DIFFERENCE_LINES]], *more]


def compared(name: str, before: Mapping[str, bytes], now: Mapping[str, bytes]) -> tuple[int, int]:
    """The numbers of things compared and of differences, which are printed."""
    names = list(dict.fromkeys([*before, *now]))
    differing = [thing for thing in names if before.get(thing) != now.get(thing)]
    for thing in differing:
        print(f"== {name}: {thing}")
        print("\n".join(f"   {line}" for line in difference(before.get(thing, b""), now.get(thing, b""))))
    print(f"{name}: {len(names):,} things compared, {len(differing)} differ", flush=True)
    return len(names), len(differing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout", metavar="CHECKOUT")
    parser.add_argument("--now", type=Path, default=ROOT, help="the checkout beside it (this one)", metavar="CHECKOUT")
    parser.add_argument("--only", help="the commands, or one arrangement of a server", metavar="NAME")
    args = parser.parse_args()
    before, now = Checkout("before", args.before.resolve()), Checkout("now", args.now.resolve())
    parts: dict[str, Arrangement | None] = {"commands": None, **{part.name: part for part in ARRANGEMENTS}}
    if args.only and args.only not in parts:
        parser.error(f"--only {args.only}: there are {', '.join(parts)}")
    counts = []
    with ThreadPoolExecutor(2) as threads:
        for name, part in parts.items():
            if args.only in (None, name):
                both = threads.map(lambda checkout, part=part: seen_by(checkout, before, part), (before, now))
                counts.append(compared(name, *both))
    things, differing = (sum(column) for column in zip(*counts, strict=True))
    print(f"{things:,} things compared, {differing} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
