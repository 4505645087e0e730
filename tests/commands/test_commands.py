"""The commands of the command line: their list, their imports, and the extras that they need."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from missing_modules import without
from script_module import load_script

from llmserve.__main__ import COMMANDS, main
from llmserve.demo import __main__ as embedded
from llmserve.errors import ConfigError
from llmserve.runtime.extras import need
from llmserve.runtime.installation import pip_install

HEAVY = ("accelerate", "datasets", "matplotlib", "onnxruntime", "scipy", "sklearn", "torch", "transformers")
TRAIN = pip_install("train")
EMBEDDED = f"{pip_install('embedded')}, or name a server with --engine URL"


def error_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a refused command prints."""
    assert main(list(words)) == 2
    out, error = capsys.readouterr()
    assert out == ""
    return error


# ---- the list of commands -------------------------------------------------------------------------------------------


def test_the_help_has_one_line_for_each_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    listed = capsys.readouterr().out.partition("  COMMAND\n")[2].partition("\n\n")[0]
    assert dict(line.split(maxsplit=1) for line in listed.splitlines()) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_loads_nothing_heavy(command: str):
    program = (
        "import sys\nfrom llmserve.__main__ import main\n"
        f"try: main([{command!r}, '--help'])\n"
        f"finally: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout.startswith(f"usage: llmserve {command} ")


def test_only_the_given_command_is_loaded():
    program = (
        "import sys\nfrom llmserve.__main__ import parser\nparser('plan')\n"
        f"print([name for name in {tuple(COMMANDS)} if f'llmserve.commands.{{name}}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "['plan']\n"


def test_an_unknown_command_is_refused_with_a_list_of_commands(capsys: pytest.CaptureFixture[str]):
    for words, meant in ((["trains"], "train"), (["serv", "--port", "1"], "serve")):
        assert main(words) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert first == f"llmserve: unknown command {words[0]}; did you mean {meant}?"
        assert second.startswith("the commands are serve, simulate, ")


def test_version_and_help_may_be_words(capsys: pytest.CaptureFixture[str]):
    for words in (["version"], ["-V"], ["--version"]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
    first, *others = capsys.readouterr().out.splitlines()
    assert others == [first, first]
    for words in (["help", "queue"], ["queue", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
    text = capsys.readouterr().out
    assert text[: len(text) // 2] == text[len(text) // 2 :]


def test_every_flag_says_what_it_is_and_what_it_takes(capsys: pytest.CaptureFixture[str]):
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        lines = capsys.readouterr().out.partition("options:\n")[2].splitlines()
        followed = zip(lines, [*lines[1:], ""], strict=True)
        silent = [
            line
            for line, next_one in followed
            if re.match(r"  --[^ ].*\S$", line) and "  " not in line.strip() and not next_one.startswith(" " * 10)
        ]
        assert silent == [], name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_flags(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "serve" in text
    assert "simulate" in text
    if shell == "bash":
        ask = f"{text}\nCOMP_WORDS=(llmserve queue --k); COMP_CWORD=2; _llmserve; echo ${{COMPREPLY[@]}}"
        assert subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout == "--key-file\n"


# ---- the predictor's commands -------------------------------------------------------------------------------------


def test_training_reports_bad_data_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text("{}\n")
    assert main(["train", "--data", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("llmserve: no usable row in ")


def test_an_evaluation_reports_a_folder_without_a_predictor(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", str(tmp_path), "--data", "a.jsonl", "--seed", "1"]) == 1
    assert "is not a predictor's folder" in capsys.readouterr().err


def test_profiling_without_an_engine_is_a_failure_in_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["profile", "--engine", "http://127.0.0.1:9", "--busy-power-w", "300"]) == 1
    assert re.fullmatch(r"llmserve: .*does not answer.*\n", capsys.readouterr().err)


def test_a_benchmark_of_nobody_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "--engine", "http://127.0.0.1:9"]) == 1
    assert re.fullmatch(r"llmserve: http://127\.0\.0\.1:9 does not answer: .*refused\n", capsys.readouterr().err)


def test_an_unknown_flag_is_an_error_with_the_nearest_flag(capsys: pytest.CaptureFixture[str]):
    error = error_line(capsys, "evaluate", "folder", "--data", "a.jsonl", "--comparison", "other")
    assert error == "llmserve: unknown argument --comparison; did you mean --compare?\n"


# ---- extras -----------------------------------------------------------------------------------------------


def test_the_first_module_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    need("plan", "numpy", "rich", why="planning")
    without(monkeypatch, "scipy", "torch")
    with pytest.raises(ConfigError) as refusal:
        need("train", "numpy", "torch", "scipy", why="training", otherwise="do something else")
    assert str(refusal.value) == f"training needs torch: {TRAIN}, or do something else"


@pytest.mark.parametrize("module", ["torch", "sklearn", "onnx"])
def test_training_without_its_extra_ends_before_the_data_are_read(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    without(monkeypatch, module)
    error = error_line(capsys, "train", "--data", "absent.jsonl", "--output", "nowhere")
    assert error == f"llmserve: training needs {module}: {TRAIN}\n"
    monkeypatch.setattr(sys, "argv", ["train_predictor.py", "--data", "absent.jsonl", "--output", "nowhere"])
    with pytest.raises(SystemExit, match=f"train_predictor: error: training needs {module}"):
        load_script("train_predictor").main()


def test_an_evaluation_without_its_extra_ends_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    without(monkeypatch, "sklearn")
    error = error_line(capsys, "evaluate", "nowhere", "--data", "absent.jsonl")
    assert error == f"llmserve: evaluating a predictor needs sklearn: {TRAIN}\n"


def test_an_evaluation_needs_no_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    without(monkeypatch, "torch", "transformers")
    assert main(["evaluate", "nowhere", "--data", "absent.jsonl"]) == 1
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["torch", "transformers"])
@pytest.mark.parametrize("command", [("serve", "--port", "0", "--engine", "embedded"), ("bench",)])
def test_without_its_extra_the_embedded_engine_is_refused_at_once(
    command: tuple[str, ...], module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    without(monkeypatch, module)
    assert error_line(capsys, *command) == f"llmserve: the embedded engine needs {module}: {EMBEDDED}\n"


def test_the_embedded_engine_alone_is_refused_too(monkeypatch: pytest.MonkeyPatch):
    without(monkeypatch, "torch")
    monkeypatch.setattr(sys, "argv", ["llmserve.demo", "--port", "0"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit, match="error: the embedded engine needs torch"):
        embedded.main()


def test_the_benchmarks_figure_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    without(monkeypatch, "matplotlib")
    error = error_line(capsys, "bench", "--engine", "http://127.0.0.1:9", "--figure", "figure.png")
    assert error == f"llmserve: --figure needs matplotlib: {pip_install('plot')}\n"


def test_a_profiles_figure_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    without(monkeypatch, "matplotlib")
    error = error_line(capsys, "profile", "--engine", "http://127.0.0.1:9", "--plot", "profile.png")
    assert error == f"llmserve: --plot needs matplotlib: {pip_install('plot')}\n"


def test_prompts_in_parquet_are_refused_without_a_reader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    without(monkeypatch, "pyarrow")
    error = error_line(capsys, "simulate", "--prompts", "prompts.parquet")
    assert error == f"llmserve: reading prompts.parquet needs pyarrow: {TRAIN}\n"


def test_the_commands_that_ask_a_server_load_few_of_its_modules():
    for command, most in (("queue", 20), ("status", 15), ("down", 15)):
        program = (
            f"import sys\nfrom llmserve.__main__ import parser\nparser({command!r})\n"
            "print([name for name in sys.modules if name.startswith(('llmserve.', 'bins', 'predictor', 'numpy'))])"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        loaded = ast.literal_eval(done.stdout)
        assert f"llmserve.commands.{command}" in loaded
        assert len(loaded) < most, loaded
