"""Random worlds whose engines hold one or two models at once: the laws hold, and no engine idles beside work."""

from dataclasses import replace

import msgspec
import pytest
from worlds import run
from worlds.drawing import World, draw

BLOCK = 40


def shared(seed: int) -> World:
    """A world with the same requests, whose engines that refill hold few models."""
    world = draw(seed)
    at_once = 1 + seed % 2
    engines = [
        life if life.info.barrier else replace(life, info=msgspec.structs.replace(life.info, models_at_once=at_once))
        for life in world.engines
    ]
    return replace(world, engines=tuple(engines))


@pytest.mark.parametrize("first_seed", range(0, 4 * BLOCK, BLOCK))
def test_worlds_with_engines_of_few_models_keep_the_laws(first_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "draw", shared)
    for seed in range(first_seed, first_seed + BLOCK):
        run.judge(seed)
