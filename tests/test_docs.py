"""The documentation is right: links lead to pages, commands exist, and measured numbers match the JSON."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from configured import load_config

from llmserve.settings.deadlines import DefaultDeadlines

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+?)\s*$", re.MULTILINE)
SCRIPT = re.compile(r"(?<![:\w])scripts/[\w/]+(?:\.py)?\b")
ONCE = re.compile(r"`git show\s+([0-9a-f]{7,}:[\w/.]+)`")  # a script that has left the tree, and a commit that has it
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# ---- links ------------------------------------------------------------------------------------------------------


def prose(text: str) -> str:
    """The text without code, where brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub generates them."""
    last_number: dict[str, int] = {}
    for heading in HEADING.findall(FENCED.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        last_number[slug] = last_number.get(slug, -1) + 1
    return {f"{slug}-{n}" if n else slug for slug, last in last_number.items() for n in range(last + 1)}


def broken_links(page: Path, text: str) -> list[str]:
    def is_broken(link: str) -> bool:
        if link.startswith(("https://", "http://")):
            return False
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.is_file() or not target.is_relative_to(ROOT):
            return True
        return bool(anchor) and anchor not in anchors(text if target == page else target.read_text())

    return [link for link in LINK.findall(prose(text)) if is_broken(link)]


@every_page
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_detected() -> None:
    text = (
        "# A b\n[x](docs/no.md) ![y](no.png) [z](docs/index.md#no-such) [here](#a-b) [w](#c) [out](../../etc/passwd)\n"
    )
    assert broken_links(README, text) == ["docs/no.md", "no.png", "docs/index.md#no-such", "#c", "../../etc/passwd"]


def linked_from(page: Path) -> set[Path]:
    links = (link.partition("#")[0] for link in LINK.findall(prose(page.read_text())) if "://" not in link)
    return {(page.parent / link).resolve() for link in links if link}


def test_every_page_and_picture_is_reached_from_the_readme() -> None:
    reached, ahead = {README}, [README]
    while ahead:
        fresh = linked_from(ahead.pop()) - reached
        reached |= fresh
        ahead += [path for path in fresh if path.suffix == ".md"]
    kinds = (".md", ".png", ".svg")
    existing = {path for path in (ROOT / "docs").rglob("*") if path.suffix in kinds}
    assert sorted(name_of(path) for path in existing - reached) == []


# ---- words ------------------------------------------------------------------------------------------------------


def test_each_word_of_the_glossary_is_explained_once() -> None:
    words = [row[0] for row in table_rows((ROOT / "docs" / "reference" / "words.md").read_text())]
    assert words
    assert len(words) == len(set(words))


# ---- commands ---------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """The words of each llmserve or script command in fenced blocks."""
    for _, block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if not re.match(r"(\$ )?(llmserve|\./scripts/|python scripts/|pip )", line):
                continue
            for part in line.removeprefix("$ ").split(" && "):
                words = shlex.split(part, comments=True)
                if words[0] in ("llmserve", "python") or words[0].startswith("./scripts/"):
                    yield words


@cache
def output_of(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


@cache
def known_flags(*command: str) -> frozenset[str]:
    """Flags that --help lists. command : as in the documents, without arguments."""
    if command[0] != "llmserve":
        text = (ROOT / command[0]).read_text() if command[0] != "python" else output_of(*command[1:], "--help")
    elif command[1] in re.findall(r"^    (\w+)  ", output_of("-m", "llmserve", "--help"), re.MULTILINE):
        text = output_of("-m", "llmserve", command[1], "--help")
        if "--help-all" in text:
            text = output_of("-m", "llmserve", command[1], "--help-all")
    else:
        raise AssertionError(f"there is no command llmserve {command[1]}")
    return frozenset(re.findall(r"--[a-z][a-z-]*", text))


def unknown_flags(words: list[str]) -> list[str]:
    """Flags that the command does not know. Raises AssertionError without such a command or script."""
    words = words[: words.index("--")] if "--" in words else words  # the rest is for vLLM
    if words[0].startswith("./"):
        command = (words[0].removeprefix("./"),)
        assert (ROOT / command[0]).is_file(), words[0]
        if command == ("scripts/serve",):  # passes its arguments on
            return unknown_flags(["llmserve", "serve", *words[1:]])
    else:
        command = tuple(words[:2])
        if words[0] == "python":
            assert (ROOT / words[1]).exists(), words[1]
            command = tuple(words[:3] if words[1] == "scripts/lab" else words[:2])
    flags = known_flags(*command)
    return [flag for word in words if word.startswith("--") and (flag := word.partition("=")[0]) not in flags]


@pytest.mark.slow
@pytest.mark.parametrize("page", [README, *GUIDES], ids=name_of)
def test_commands_exist_and_know_their_flags(page: Path) -> None:
    listed = list(commands(page.read_text()))
    assert listed
    assert [(words, unknown) for words in listed if (unknown := unknown_flags(words))] == []


def test_wrong_commands_are_detected() -> None:
    lines = ("$ llmserve simulate --barier --load 1", "pip install . && llmserve serve --port 1 -- --vllms")
    first, second = commands("\n".join(("```", *lines, "```", "`llmserve no`")))
    assert unknown_flags(first) == ["--barier"]
    assert unknown_flags(second) == []
    for words in (["llmserve", "siumlate"], ["python", "scripts/no.py"], ["./scripts/no"]):
        with pytest.raises(AssertionError):
            unknown_flags(words)


@every_page
def test_every_named_script_exists(page: Path) -> None:
    named = {name.rstrip("/") for name in SCRIPT.findall(page.read_text())} - {"scripts/lab"}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@every_page
def test_every_part_of_the_laboratory_that_a_page_runs_exists(page: Path) -> None:
    known = {name for name, _, _ in runpy.run_path(str(ROOT / "scripts" / "lab" / "__main__.py"))["scripts"]()}
    named = set(re.findall(r"python scripts/lab ([a-z_.]+)", page.read_text()))
    assert sorted(name for name in named if name not in known) == []


MODULE = re.compile(r"(?<![\w/.:-])(?:[a-z_]+/)+[a-z_]+\.py\b")
FOLDERS = ("", "llmserve", "llmserve/scheduling", "llmserve/jobs")  # which a module may be named from


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md", ROOT / "docs" / "design.md", *GUIDES], ids=name_of)
def test_every_named_module_exists(page: Path) -> None:
    named = set(MODULE.findall(page.read_text()))
    assert sorted(name for name in named if not any((ROOT / folder / name).is_file() for folder in FOLDERS)) == []


def test_every_script_that_has_left_is_in_the_commit_that_its_page_names() -> None:
    named = sorted({name for page in PAGES for name in ONCE.findall(page.read_text())})
    assert named

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this checkout does not have the history")
    assert [name for name in named if git("cat-file", "-e", name).returncode] == []


# ---- examples ---------------------------------------------------------------------------------------------------


def blocks(page: str, language: str) -> list[str]:
    return [block for kind, block in FENCED.findall((ROOT / page).read_text()) if kind == language]


def normalised(text: str) -> str:
    """The text without line breaks and without times, which differ."""
    text = re.sub(r"Planned in [\d.]+ s|solved in \(ms\) +│ +[\d.]+", "", text)
    return " ".join(re.sub(r"[━─]+", "-", text).split())


def test_the_readmes_simulation_prints_what_the_guide_shows() -> None:
    (words,) = [words for words in commands(README.read_text()) if words[:2] == ["llmserve", "simulate"]]
    (expected,) = [block for block in blocks("docs/guide/simulating.md", "") if "latency (s)" in block]
    assert normalised(output_of("-m", *words)) == normalised(expected)


def test_the_guides_policy_is_as_printed() -> None:
    (block,) = [block for block in blocks("docs/guide/energy.md", "") if block.startswith("$ llmserve solve")]
    command, _, expected = block.partition("\n")
    assert normalised(output_of("-m", *shlex.split(command)[1:])) == normalised(expected)


def test_the_guides_instance_is_planned_as_shown(tmp_path: Path) -> None:
    instance, _ = blocks("docs/guide/models-and-deadlines.md", "json")
    (tmp_path / "instance.json").write_text(instance)
    (block,) = [
        candidate
        for candidate in blocks("docs/guide/models-and-deadlines.md", "")
        if candidate.startswith("$ llmserve plan")
    ]
    expected = block.partition("\n")[2]
    words = ["--instance", str(tmp_path / "instance.json"), "--output", str(tmp_path / "plan.json")]
    assert normalised(output_of("-m", "llmserve", "plan", *words)) == normalised(expected)


def test_the_settings_file_is_accepted_as_it_stands(tmp_path: Path) -> None:
    (text,) = blocks("docs/guide/several-engines.md", "toml")
    file = tmp_path / "llmserve.toml"
    file.write_text(text)
    config = load_config({}, {}, str(file))
    assert config.scheduling.order == "edf"
    assert not DefaultDeadlines(config.limits.slo_ms).keys, "deadlines of keys are refused without a key file"


@pytest.mark.filterwarnings("error")
def test_the_library_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "scheduling")  # folder of the page's file
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks("docs/guide/as-a-library.md", "python")):
        exec(compile(block, f"block {number}", "exec", dont_inherit=True), names)
    assert names["summary"].completed == names["scenario"].requests == 500


@pytest.mark.slow
def test_the_library_pages_scripts_are_typed(tmp_path: Path) -> None:
    """A user might keep each block by itself; the last block uses the first one's imports."""
    parts = blocks("docs/guide/as-a-library.md", "python")
    files = []
    for number, block in enumerate(parts):
        file = tmp_path / f"script_{number}.py"
        file.write_text(block if number < len(parts) - 1 else f"{parts[0]}\n{block}")
        files.append(str(file))
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), *files]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_readmes_python_is_python() -> None:
    (block,) = blocks("README.md", "python")
    compile(block, "README.md", "exec")


# ---- numbers ----------------------------------------------------------------------------------------------------


@cache
def results(name: str) -> Any:
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())


def row_of(rows: list[dict[str, Any]], **cells: Any) -> dict[str, Any]:
    (row,) = [row for row in rows if cells.items() <= row.items()]
    return row


def burst(arrangement: str, quantity: str, part: str = "burst", run: str = "vllm") -> float:
    rows = results(run)[part]["rows"]
    return float(row_of(rows, arrangement=arrangement)["ratios"]["direct"][quantity])


def beside_power_of_two(arrangement: str, run: str = "vllm") -> float:
    row = row_of(results(run)["routers"]["rows"], arrangement=arrangement)
    return float(row["ratios"]["power_of_two"]["latency_s_p95"])


def deadlines_met(policy: str, streams: tuple[str, ...] = ("images", "chats")) -> float:
    """Percentage, median of the rounds."""

    def met(run: Mapping[str, Any]) -> float:
        ends = [run["counts"][stream]["ends"] for stream in streams]
        return sum(end["in time"] for end in ends) / sum(sum(end.values()) for end in ends)

    return 100 * statistics.median(met(run) for run in results("deadlines")["runs"] if run["policy"] == policy)


def waiting(quantity: str, case: str = "load 0.1") -> float:
    """Ratio of `table` with a target to the best greedy."""
    rows = results("dispatch")["rows"]
    rule = "table, p95 within 1.4 of greedy's"
    table, greedy = (row_of(rows, part="load", case=case, rule=name)[quantity] for name in (rule, "greedy, 2 bins"))
    return float(table / greedy)


def gain(arrangement: str, run: str = "throughput") -> float:
    return float(row_of(results(run)["rows"], arrangement=arrangement)["gain"])


def on_h200(case: str) -> float:
    """Tokens per second beside one bin."""
    steps = results("gpu/h200/bins")["steps"]
    one, other = (steps[f"batches of 32: {name}"]["tokens_per_s"] for name in ("one bin, oracle", case))
    return float(other / one)


def saved_on_h200(release: str) -> float:
    """Percent of the energy per token of greedy at load 0.1."""
    steps = results("gpu/h200/energy")["steps"]
    greedy, other = (steps[f"{name} at load 0.1"]["joules_per_token"] for name in ("greedy", release))
    return float(100 * (1 - other / greedy))


def people(score: str) -> float:
    return float(results("predictor-people")["gains"][score]["8"]["8"])


Claims = Mapping[str, tuple[Callable[[], float], ...]]
ROUGH, SHORTEST, RANDOM = "llmserve boost, predicted", "llmserve shortest, predicted", "llmserve shortest, random"
PRIORITY = "vLLM by priority, predicted"
COLD, WARM = "llmserve boost, own forecasts, cold", "llmserve boost, own forecasts, warm"
RATIOS = ("tokens_per_s", "latency_s_mean", "latency_s_p99")
BURST: Claims = {
    "llmserve, predictions as rough as real ones": tuple(lambda q=q: burst(ROUGH, q, run="vllm-boost") for q in RATIOS),
    "llmserve, no trained predictor, after 400 other answers": tuple(lambda q=q: burst(WARM, q, "own") for q in RATIOS),
    "llmserve, no trained predictor, first start": tuple(lambda q=q: burst(COLD, q, "own") for q in RATIOS),
    "llmserve, random predictions": tuple(lambda q=q: burst(RANDOM, q) for q in RATIOS),
    "vLLM alone, the same rough predictions as priorities": tuple(
        lambda q=q: burst(PRIORITY, q, run="vllm-boost") for q in RATIOS
    ),
}
MEASURED: Claims = {
    "an H200, a Llama of 1B in static batches of 32, answers of known lengths": (
        lambda: on_h200("8 bins, oracle"),
        lambda: on_h200("a window, oracle"),
        lambda: on_h200("8 bins, predicted"),
        lambda: on_h200("a window, predicted"),
        lambda: saved_on_h200("full"),
        lambda: saved_on_h200("table"),
    ),
    "an engine with static batches of 8, a burst": (
        lambda: gain("8 bins, risk"),
        lambda: gain("8 bins, oracle"),
        lambda: gain("window, risk", "throughput-windows"),
        lambda: gain("8 bins, risk", "throughput-windows"),
    ),
    "two GPUs (timed fakes, no model) with two models each, a burst in the middle": (
        lambda: deadlines_met("flex"),
        lambda: deadlines_met("fffs"),
        lambda: deadlines_met("flex", ("chats",)),
    ),
    "delaying requests to fill batches, at a tenth of an H100's load, simulated": (
        lambda: 100 * (1 - waiting("energy_j_per_token")),
        lambda: waiting("latency_s_p95"),
    ),
    "overhead of llmserve, one process": (
        lambda: results("frontend")["medians"]["llmserve"]["requests_per_s_at_32"],
        lambda: results("frontend")["medians"]["bare pass-through"]["requests_per_s_at_32"],
        lambda: results("vllm")["idle"]["added_latency_ms"],
    ),
}
SENTENCES: Claims = {  # sentences of README's limits -> their numbers
    r"(\d\.\d\d), that of `shortest` (\d\.\d\d) to (\d\.\d\d) times that of vllm-router's power of two": (
        lambda: beside_power_of_two("llmserve boost, predicted", "vllm-boost"),
        lambda: beside_power_of_two("llmserve shortest, oracle"),
        lambda: beside_power_of_two(SHORTEST),
    ),
    r"(\d\.\d\d) times the\s+throughput with 8 bins where known lengths give (\d\.\d\d)": (
        lambda: people("predictor, bins by risk"),
        lambda: people("oracle"),
    ),
}
WORDS_OF_NUMBERS = re.compile(r"\bp\d\d\b|\b8 bins\b|`[^`]*`")  # numbers that are no results


def table_rows(text: str) -> list[list[str]]:
    """Cells of all table rows of a text, without the heads."""
    rows: list[list[str]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        is_head = number + 1 < len(lines) and lines[number + 1].startswith("|---")
        if line.startswith("|") and not line.startswith("|---") and not is_head:
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def wrong_numbers(written: list[str], claim: tuple[Callable[[], float], ...]) -> list[tuple[str, float]]:
    """Numbers as written that differ from the measured ones rounded to the same digits."""
    assert len(written) == len(claim), written
    measured = [value_of() for value_of in claim]

    def as_written(text: str, value: float) -> str:
        return f"{value:,.{len(text.partition('.')[2])}f}"

    return [(text, value) for text, value in zip(written, measured, strict=True) if as_written(text, value) != text]


def section(text: str, start: str) -> str:
    """From the line that begins with `start` to the next heading."""
    match = re.search(rf"^{re.escape(start)}.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, start
    return match[0]


@pytest.mark.parametrize(("start", "claims"), [("| arrangement", BURST), ("## Measured", MEASURED)])
def test_every_measured_number_of_the_readme_is_in_the_results(start: str, claims: Claims) -> None:
    rows = table_rows(section(README.read_text(), start))
    assert [row[0] for row in rows] == list(claims)
    for label, *cells in rows:
        pages = LINK.findall(cells[-1])
        numbers = NUMBER.findall(WORDS_OF_NUMBERS.sub("", " ".join(cells[:-1] if pages else cells)))
        assert wrong_numbers(numbers, claims[label]) == [], label
        assert pages or start == "| arrangement", "each row of figures must name its page"


@pytest.mark.parametrize("pattern", SENTENCES, ids=["routers", "people's prompts"])
def test_the_limits_are_as_large_as_measured(pattern: str) -> None:
    match = re.search(pattern, README.read_text())
    assert match, pattern
    assert wrong_numbers(list(match.groups()), SENTENCES[pattern]) == []


def test_a_wrong_number_is_detected() -> None:
    claim = (lambda: 0.4861, lambda: 3237.0)
    assert wrong_numbers(["0.49", "3,237"], claim) == []
    assert wrong_numbers(["0.48", "3,238"], claim) == [("0.48", 0.4861), ("3,238", 3237.0)]
    with pytest.raises(AssertionError):
        wrong_numbers(["0.49"], claim)


# ---- excerpts of the code --------------------------------------------------------------------------------------------


def test_the_code_of_the_guide_to_a_feature_is_the_code() -> None:
    """The lines of each excerpt stand in the file that its first line names, in this order."""
    excerpts = blocks("docs/guide/adding-a-feature.md", "python")
    assert len(excerpts) == 2
    for excerpt in excerpts:
        named, *lines = [line for line in excerpt.splitlines() if line.strip()]
        code = iter((ROOT / named.removeprefix("# ")).read_text().splitlines())
        missing = [line for line in lines if line not in code]  # the search goes on behind the line found before
        assert missing == []
