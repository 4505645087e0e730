"""Say in plain words what is wrong or slow in a running server, or in a configuration, with each remedy.

    llmserve doctor                                               what has been since the start of http://127.0.0.1:8000
    llmserve doctor --url http://127.0.0.1:8000 --for-s 60        what is now
    llmserve doctor --config llmserve.toml                        before a start: asks the engines by URL, too

The exit status is 1 if something is wrong; what is slow, and notes, leave it at 0. A server with keys needs
--key-file FILE, whose first key is sent: the server's --admin-key-file.
"""

from __future__ import annotations

import argparse
import logging
import os
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from llmserve.commands import asking
from llmserve.doctor.finding import LEVELS, Finding, Level
from llmserve.errors import ConfigError, NoAnswer
from llmserve.observe.scrape import Scrape
from llmserve.settings import load as configuration
from llmserve.tenants.key_file import read_key_to_send

NEEDS_KEY = "shows its metrics with a key only: give --key-file FILE, its --admin-key-file, or ask its --metrics-port"
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    asking.add_server(parser)
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of `llmserve serve`; LLMSERVE_... variables count, too"
    )
    parser.add_argument(
        "--for-s",
        type=float,
        default=0.0,
        metavar="S",
        help="of a server: look at these seconds, not at all since the start",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as a JSON object")


def main(args: argparse.Namespace) -> int:
    found = of_configuration(args.config) if args.config else of_server(args.url, args.key_file, args.for_s)
    found = sorted(found, key=lambda finding: LEVELS.index(finding.level))
    counts = {level: sum(finding.level == level for finding in found) for level in LEVELS}
    if args.json:
        print(msgspec.json.format(msgspec.json.encode({**counts, "findings": found}), indent=2).decode())
    else:
        print("\n".join([*map(shown, found), summary(counts)]))
    return 1 if counts["wrong"] else 0


def shown(finding: Finding) -> str:
    """The finding as lines of text."""
    lines = [*textwrap.wrap(finding.what, WIDTH - 7), *textwrap.wrap(finding.remedy, WIDTH - 7)]
    first, *others = lines
    return "\n".join([f"{finding.level:<6} {first}", *[f"       {line}" for line in others], ""])


def summary(counts: Mapping[Level, int]) -> str:
    if not any(counts.values()):
        return "Nothing is wrong."
    notes = f"{counts['note']} {'note' if counts['note'] == 1 else 'notes'}"
    return f"{counts['wrong']} wrong, {counts['slow']} slow, {notes}"


# ---- a configuration ----


def of_configuration(file: str) -> list[Finding]:
    from llmserve.doctor import config as doctor_config
    from llmserve.settings.tree import Config

    logging.getLogger("llmserve").addHandler(logging.NullHandler())  # what a start warns of is among the findings
    if not Path(file).is_file():
        raise ConfigError(f"there is no file {file}")
    try:
        config, _ = configuration.load(Config, {}, os.environ, file)
    except ConfigError as error:
        return [Finding("wrong", "settings", f"The server does not start: {error}.", "Correct the file.")]
    return doctor_config.findings(config)


# ---- a running server ----


def of_server(url: str, key_file: Path | None, seconds: float) -> list[Finding]:
    from llmserve.doctor import running as doctor_running

    key = read_key_to_send(key_file) if key_file is not None else None
    scrape = scraped(url, key)
    if "llmserve_build_info" not in scrape:
        raise NoAnswer(f"{url} is no llmserve, or one of before 0.1.0")
    lived_s = time.time() - scrape.sum("process_start_time_seconds")
    if seconds > 0:
        time.sleep(seconds)
        before, scrape, lived_s = scrape, scraped(url, key), seconds
        scrape.since(before)
    return doctor_running.findings(scrape, lived_s)


def scraped(url: str, key: str | None) -> Scrape:
    """One reading of /metrics. Raises ConfigError for a bad URL or key, and NoAnswer."""
    body = asking.ask(url, "/metrics", key, {401: NEEDS_KEY})
    try:
        return Scrape(body.decode())
    except ValueError as error:
        raise NoAnswer(f"{url} has no metrics, but {body[:40]!r}") from error
