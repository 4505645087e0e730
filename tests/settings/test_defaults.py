"""What the help and the reference say of a default is what the program does."""

import argparse
import re
import typing

import msgspec
import pytest

from llmserve.__main__ import COMMANDS, parser
from llmserve.commands.solve import BASIC, Problem
from llmserve.engines.kinds import LOOK_AHEAD_BY_PRIORITY
from llmserve.settings.policies import Defaults, SchedulingConfig
from llmserve.settings.tree import EngineConfig


def described(struct: type[msgspec.Struct], field: str) -> str:
    """The description of a setting."""
    hint = typing.get_type_hints(struct, include_extras=True)[field]
    return next(meta.description for meta in typing.get_args(hint)[1:] if meta.description)


@pytest.mark.parametrize("setting", Defaults._fields)
def test_a_default_that_depends_on_the_engines_is_named_for_both_kinds(setting: str) -> None:
    barrier, refill = (getattr(SchedulingConfig().resolved(barrier=kind), setting) for kind in (True, False))
    assert described(SchedulingConfig, setting).endswith(
        f" (default: {barrier} where engines run batches to their end, {refill} where slots refill)"
    )


def test_defaults_that_depend_on_other_settings_are_named() -> None:
    full = SchedulingConfig(release="full").resolved(barrier=False)
    assert f"the release waits for a batch, the default is {full.batch_size} (" in described(
        SchedulingConfig, "batch_size"
    )
    binned, flex = (
        SchedulingConfig(bins=4).resolved(barrier=True),
        SchedulingConfig(order="flex").resolved(barrier=True),
    )
    named = f"With bins or edges, the default is {binned.release}, and under flex and clockwork {flex.release} ("
    assert named in described(SchedulingConfig, "release")
    greedy, window = (SchedulingConfig(release=name).resolved(barrier=True) for name in ("greedy", "window"))
    assert f"(default: {greedy.bins}, or {window.bins} under" in described(SchedulingConfig, "bins")
    patient = SchedulingConfig(order="shortest").resolved(barrier=False)
    assert f"(default: {patient.patience:g})" in described(SchedulingConfig, "patience")
    assert SchedulingConfig(patience=3.0).resolved(barrier=False).order == "shortest"
    assert "under --order shortest, which it selects if no order is set" in described(SchedulingConfig, "patience")


def test_defaults_that_another_module_fills_in_are_named() -> None:
    text = described(EngineConfig, "look_ahead")
    assert f"learnt from answers; {LOOK_AHEAD_BY_PRIORITY} if the engine goes by priority" in text
    for field, curve in (("latency_ms", BASIC.step_s), ("energy_mj", BASIC.step_j)):
        numbers = re.search(r"\(default ([\d.]+),([\d.]+)\)", described(Problem, field))
        assert numbers is not None
        slope, intercept = (float(number) / 1e3 for number in numbers.groups())
        assert [float(curve.at(size)) for size in (1, 10)] == pytest.approx([slope + intercept, 10 * slope + intercept])
    assert f"(default {Problem().weight:g})" in described(Problem, "energy_weight")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flags_help_names_the_default_that_the_flag_has(command: str) -> None:
    subcommands = next(action for action in parser(command)._actions if isinstance(action, argparse._SubParsersAction))
    of_command = subcommands.choices[command]
    for action in of_command._actions:
        text = of_command._get_formatter()._expand_help(action) if action.help else ""
        named = re.search(r"\(default:? ([^();,]*?)\)", text)
        if named is not None and action.default not in (None, argparse.SUPPRESS):
            default = action.default
            shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
            assert shown in (named[1], f"{named[1]}.0"), action.option_strings
