"""Print what a shell needs to complete llmserve's commands and flags.

source <(llmserve completion bash)                                  also in ~/.bashrc
source <(llmserve completion zsh)                                   also in ~/.zshrc
llmserve completion fish > ~/.config/fish/completions/llmserve.fish
"""

from __future__ import annotations

import argparse

BASH = """\
_llmserve() {{
    local words="{commands}" command=${{COMP_WORDS[1]}}
    if [ "$COMP_CWORD" -gt 1 ]; then
        case "$command" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
    if [ "${{#COMPREPLY[@]}}" -eq 0 ]; then
        COMPREPLY=($(compgen -f -- "${{COMP_WORDS[COMP_CWORD]}}"))
    fi
}}
complete -o filenames -F _llmserve llmserve
"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def main(args: argparse.Namespace) -> int:
    flags = args.flags_by_command()
    if args.shell == "fish":
        lines = ["complete -c llmserve -f -n __fish_use_subcommand -a '" + " ".join(flags) + "'"]
        for command, names in flags.items():
            condition = f"complete -c llmserve -n '__fish_seen_subcommand_from {command}'"
            lines += [f"{condition} -l {name.removeprefix('--')}" for name in names]
        print("\n".join(lines))
        return 0
    cases = [f'        {command}) words="{" ".join(names)}" ;;' for command, names in flags.items()]
    print((ZSH if args.shell == "zsh" else "") + BASH.format(commands=" ".join(flags), cases="\n".join(cases)), end="")
    return 0
