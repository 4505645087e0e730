"""A slice of scripts/lab/campaigns/kill_jobs.py: kill -9 at random moments."""

from __future__ import annotations

import pytest
from campaigns import kill_jobs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("victim", "store"), [("front-end", "sqlite"), ("front-end", "postgresql"), ("engine", "sqlite")]
)
async def test_jobs_survive_kill_9(victim: str, store: str, request: pytest.FixtureRequest) -> None:
    if store == "postgresql":
        request.getfixturevalue("postgres")  # skips without PostgreSQL
    jobs = await kill_jobs.campaign(kills=4, lines=200, victim=victim, store=store, seed=3)
    assert sum(job["kills"] for job in jobs) == 4


async def test_damage_to_a_job_leaves_the_others_as_they_are() -> None:
    jobs = await kill_jobs.campaign(kills=4, lines=200, victim="front-end", store="sqlite", seed=5, damage=True)
    assert sum(job["kills"] for job in jobs) == 4
