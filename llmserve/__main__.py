"""`llmserve COMMAND`. Only the chosen command's module is imported. Heavy imports are inside its functions."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from llmserve import __version__
from llmserve.commands.help_text import HelpFormatter
from llmserve.errors import ConfigError, LLMServeError
from llmserve.runtime.installation import check_packages
from llmserve.spelling import nearest

if TYPE_CHECKING:
    from llmserve.simulation.scenario import Answers

BROKEN_PIPE = 141  # exit status, as in shells
COMMANDS = {  # modules of llmserve.commands, each with add_arguments and main
    "serve": "run the front-end, with its own engine or other engines",
    "simulate": "run the same scheduler under a virtual clock",
    "tune": "replay a server's journal under other orders; name the best",
    "solve": "compute when a bin should wait, and when to release a batch",
    "plan": "choose which models share which GPUs, for the largest bursts",
    "profile": "measure the duration and energy of an engine's batches",
    "train": "train a predictor of answer lengths",
    "evaluate": "evaluate a predictor, or what a server learns online",
    "bench": "measure the throughput gain of bins on a real engine",
    "chat": "talk to a model of a running server, in the terminal",
    "doctor": "say what is wrong or slow in a server or its settings",
    "keys": "create, list, revoke and hash keys of a file",
    "queue": "show who waits in a running server, and for how long",
    "batch": "run a file of requests, or show a server's batches",
    "up": "start engines, groups and gateways on a Ray cluster",
    "status": "show a cluster's gateways, groups and engines",
    "down": "stop a cluster",
    "completion": "print what a shell needs to complete commands and flags",
}
USAGE = {
    "serve": "[options] [-- VLLM_OPTIONS]",
    "keys": "create NAME | list | revoke NAME | hash --api-key-file FILE",
    "queue": "[--url URL] --key-file FILE [--json]",
    "chat": "[QUESTION] [--url URL] [--key-file FILE] [--model NAME]",
    "completion": "bash | zsh | fish",
    "batch": "run INPUT OUTPUT --engine URL | list | show ID | cancel ID [--url URL]",
    "doctor": "[--url URL | --config FILE] [options]",
    "up": "CLUSTER.toml [options]",
    "status": "[NAME] [--address HOST:PORT] [--json]",
    "down": "[NAME] [--address HOST:PORT]",
    "evaluate": "[PREDICTOR | --online] [options]",
}  # else: [options]
CLIENTS = ("queue", "chat", "completion", "status", "down")  # they ask another process, and compute nothing


def parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands. Only the chosen command has its arguments, and only its module is loaded."""
    top = argparse.ArgumentParser(
        prog="llmserve",
        description="An OpenAI-compatible front-end that batches prompts by predicted answer length.",
    )
    top.add_argument("-V", "--version", action="version", version=f"llmserve {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_ in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=help_)
            continue
        module = importlib.import_module(f"llmserve.commands.{name}")
        command = commands.add_parser(
            name,
            help=help_,
            description=module.__doc__,
            formatter_class=HelpFormatter,
            usage=f"llmserve {name} {USAGE.get(name, '[options]')}",
            allow_abbrev=False,
        )
        module.add_arguments(command)
        flags = [flag for action in command._actions for flag in action.option_strings]
        run = partial(module.main, read_answers=_read_answers) if name == "simulate" else module.main
        command.set_defaults(main=run, flags=flags, program="llmserve", flags_by_command=flags_by_command)
    return top


def flags_by_command() -> dict[str, list[str]]:
    """The flags of each command, whose modules are all loaded."""
    flags = {}
    for name in COMMANDS:
        command = argparse.ArgumentParser()
        importlib.import_module(f"llmserve.commands.{name}").add_arguments(command)
        shown = [action for action in command._actions if action.help is not argparse.SUPPRESS]
        flags[name] = [flag for action in shown for flag in action.option_strings if flag.startswith("--")]
    return flags


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0 success, 1 run-time error, 2 wrong arguments or settings."""
    words, for_engine = _split(sys.argv[1:] if argv is None else argv)
    # Only flags without a value may precede the command.
    index = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    if words[index : index + 1] == ["help"]:  # llmserve help [COMMAND]
        words = [*words[index + 1 : index + 2], "--help"]
        index = 0
    elif words[index : index + 1] == ["version"]:
        words, index = ["--version"], 1
    elif index < len(words) and words[index] not in COMMANDS:
        print(f"llmserve: unknown command {words[index]}{nearest(words[index], COMMANDS)}", file=sys.stderr)
        print(f"the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        if index < len(words):
            check_packages()  # before the command's module is loaded, which may need them
        args, unknown = parser(*words[index : index + 1]).parse_known_args(words)
        args.words = words[index + 1 :]
        if for_engine:
            args.engine_args = for_engine
        if unknown:
            raise ConfigError(f"unknown argument {unknown[0]}{nearest(unknown[0], args.flags)}")
        if args.command not in CLIENTS:
            _limit_threads()
        status = int(args.main(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader closed the pipe: do not flush into the pipe at the exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except ConfigError as error:
        print(f"llmserve: {error}", file=sys.stderr)
        return 2
    except LLMServeError as error:
        print(f"llmserve: {error}", file=sys.stderr)
        return 1


def _limit_threads() -> None:
    """Compute with one thread: the matrices are small, so that several threads cost more time than they save.

    Also, plans are made next to a server that needs its cores.
    """
    import numpy  # noqa: F401  numpy's libraries must be loaded before their threads can be limited
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, user_api="blas")


def run_script(program: str, command: ModuleType, argv: Sequence[str] | None = None) -> int:
    """Run a command as a script. Returns the exit status; exits with one line on an LLMServeError.

    argv : None: the arguments of the command line.
    """
    script_parser = argparse.ArgumentParser(
        prog=f"{program}.py", description=command.__doc__, formatter_class=HelpFormatter
    )
    command.add_arguments(script_parser)
    words = sys.argv[1:] if argv is None else list(argv)
    args = script_parser.parse_args(words, argparse.Namespace(program=program, words=words))
    try:
        return int(command.main(args))
    except LLMServeError as error:
        sys.exit(f"{program}: error: {error}")


def _read_answers(source: str, folder: str | None, *, learning: bool = False) -> Answers:
    """Call simulation.prompt_rows.read_answers: the simulator gets the function from here, and imports no predictor."""
    from llmserve.simulation.prompt_rows import read_answers

    return read_answers(source, folder, learning=learning)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of `serve` at `--`: llmserve's arguments, and the engine's."""
    if argv[:1] != ["serve"] or "--" not in argv:
        return argv, []
    cut = argv.index("--")
    return argv[:cut], argv[cut + 1 :]


if __name__ == "__main__":
    sys.exit(main())
