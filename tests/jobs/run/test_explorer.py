"""Random interleavings with a store that fails at any statement; explorer.py has the laws."""

from __future__ import annotations

from pathlib import Path

import pytest
from explorer import World, explore


@pytest.mark.parametrize("seed", range(8))
def test_jobs_obey_their_laws(tmp_path: Path, seed: int) -> None:
    explore(tmp_path, seed)


@pytest.mark.slow
def test_jobs_obey_their_laws_in_many_worlds(tmp_path: Path) -> None:
    worlds: list[World] = []
    for seed in range(1000, 1150):
        (tmp_path / str(seed)).mkdir()
        try:
            worlds.append(explore(tmp_path / str(seed), seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert sum(world.kills for world in worlds) > 300
    assert sum(world.executions for world in worlds) > 3_000


def test_a_seed_gives_the_same_run_again(tmp_path: Path) -> None:
    runs = []
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        world = explore(tmp_path / folder, 7)
        runs.append((world.kills, world.executions, len(world.inputs)))
    assert runs[0] == runs[1]
