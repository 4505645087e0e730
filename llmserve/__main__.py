"""`llmserve serve | simulate | solve`. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import argparse
import sys

import numpy  # noqa: F401 (its libraries must be loaded before they are limited)
from threadpoolctl import threadpool_limits

from llmserve import __version__
from llmserve.errors import ConfigError, LLMServeError


def parser() -> argparse.ArgumentParser:
    from llmserve import serve, simulate, solve

    top = argparse.ArgumentParser(
        prog="llmserve",
        description="An OpenAI-compatible front-end that batches prompts by predicted answer length.",
    )
    top.add_argument("--version", action="version", version=f"llmserve {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, help_ in (
        ("serve", serve, "run the front-end, with the embedded engine or in front of other servers"),
        ("simulate", simulate, "run the same scheduler under a virtual clock"),
        ("solve", solve, "when a bin should wait and when it should go"),
    ):
        command = commands.add_parser(
            name,
            help=help_,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=f"llmserve {name} [options]" + (" [-- VLLM_OPTIONS]" if name == "serve" else ""),
            allow_abbrev=False,
        )
        module.add_arguments(command)
        flags = [flag for action in command._actions for flag in action.option_strings]
        command.set_defaults(main=module.main, flags=flags)
    return top


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 failed at run time, 2 wrongly asked."""
    # Our matrices are small: threads that share them cost more than they give, and plans are made beside a server that
    # needs its cores.
    threadpool_limits(1, user_api="blas")
    words, for_engine = _split(sys.argv[1:] if argv is None else argv)
    args, unknown = parser().parse_known_args(words)
    if for_engine:
        args.engine_args = for_engine
    try:
        if unknown:
            from llmserve.config import nearest

            raise ConfigError(f"unknown argument {unknown[0]}{nearest(unknown[0], args.flags)}")
        return int(args.main(args))
    except ConfigError as error:
        print(f"llmserve: {error}", file=sys.stderr)
        return 2
    except LLMServeError as error:
        print(f"llmserve: {error}", file=sys.stderr)
        return 1


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is for us, and what follows `--`, which `serve` passes on to the engine."""
    if argv[:1] != ["serve"] or "--" not in argv:
        return argv, []
    cut = argv.index("--")
    return argv[:cut], argv[cut + 1 :]


if __name__ == "__main__":
    sys.exit(main())
