"""Which jobs are in memory. Numbers are ends of windows; names tell the keys: `red-1` is a job of the key `red`."""

from __future__ import annotations

import pytest

from llmserve.jobs.run import seats
from llmserve.jobs.run.seats import PARKED_SEATS, SEATS, Seated, Seeking, deal


def key_of(name: str) -> str:
    return name.partition("-")[0]


def seated(name: str, expires_at: float = 1e9, *, parked: bool = False, idle: bool = False) -> Seated:
    return Seated(name, key_of(name), expires_at, parked or idle, idle)


def seeking(name: str, expires_at: float = 1e9, not_before: float = 0.0) -> Seeking:
    return Seeking(not_before, expires_at, name, key_of(name))


def test_free_seats_go_to_the_keys_in_turn_and_within_a_key_to_the_most_urgent() -> None:
    jobs = [seeking("red-2", 2.0), seeking("red-1", 1.0), seeking("red-3", 3.0), seeking("blue-1", 9.0)]
    assert deal([], jobs) == ([], ["red-1", "blue-1", "red-2", "red-3"])


def test_a_key_with_fewer_seats_comes_first() -> None:
    assert deal([seated("red-1"), seated("red-2")], [seeking("red-3", 1.0), seeking("blue-1", 5.0)])[1][0] == "blue-1"


def test_without_free_seats_only_the_first_job_of_a_key_gets_one() -> None:
    running = [seated(f"red-{number}", 10.0 + number) for number in range(SEATS)]
    jobs = [seeking("red-later", 99.0), seeking("blue-1", 50.0), seeking("blue-2", 60.0)]
    assert deal(running, jobs) == ([], ["blue-1"])
    assert deal(running, [seeking("red-urgent", 5.0)]) == ([], ["red-urgent"]), "its window ends before all of its key"


def test_parked_jobs_leave_the_seats_of_running_ones_free() -> None:
    parked = [seated(f"red-{number}", parked=True) for number in range(SEATS)]
    assert deal(parked, [seeking("red-next")]) == ([], ["red-next"])


def test_an_idle_job_loses_its_seat_only_when_all_are_taken() -> None:
    parked = [seated(f"red-{number}", idle=True) for number in range(SEATS + PARKED_SEATS)]
    assert deal(parked[1:], [seeking("blue-1")]) == ([], ["blue-1"])
    assert deal(parked, [seeking("blue-1")]) == (["red-0"], ["blue-1"])


def test_a_parked_job_with_lines_in_flight_keeps_its_seat() -> None:
    parked = [seated(f"red-{number}", 1.0, parked=True) for number in range(SEATS + PARKED_SEATS)]
    running = seated("blue-0", 1.0)
    assert deal([*parked[1:], running], [seeking("blue-1", 2.0)]) == ([], [])
    assert deal([*parked[1:], running], [seeking("green-1", 2.0)]) == ([], ["green-1"]), "the first of its key"


def test_a_job_that_gave_its_seat_away_comes_after_all_others_of_its_key() -> None:
    jobs = [seeking("red-back", 1.0, not_before=7.0), seeking("red-new", 2.0)]
    assert deal([], jobs)[1] == ["red-new", "red-back"]


@pytest.mark.parametrize("keys", [1, 3, 40])
def test_every_job_gets_a_seat_in_the_end(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """Jobs run in turns: those with seats end, and others follow."""
    monkeypatch.setattr(seats, "SEATS", 2)
    monkeypatch.setattr(seats, "PARKED_SEATS", 1)
    left = [seeking(f"{number % keys}-{number}", float(number)) for number in range(100)]
    for _ in range(100):
        _, given = deal([], left)
        assert len(given) <= max(2, keys)
        left = [job for job in left if job.id not in given]
    assert left == []
