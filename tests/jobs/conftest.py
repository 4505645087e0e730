"""Stores for tests: SQLite in a folder, and a PostgreSQL cluster of the tests' own."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from batch_client import client_of
from front import Front, StartFront
from kit.postgres import Cluster, cluster, programs

from llmserve.engines.timed.server import FakeEngine
from llmserve.jobs.store.sqlite import sqlite_url
from llmserve.settings.tree import ServerConfig

_databases = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A running cluster. Continuous integration must have PostgreSQL."""
    if programs() is None and not os.environ.get("CI"):
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    with cluster() as running:
        yield running


@pytest.fixture
def postgres_url(postgres: Cluster) -> str:
    """The URL of an empty database, which several servers may share."""
    return postgres.url(f"test_{os.getpid()}_{next(_databases)}")


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "jobs.sqlite")
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(slots=8, step_s=0.0005) as engine:
        yield engine


@pytest.fixture
async def front(start_front: StartFront, engine: FakeEngine, tmp_path: Path) -> Front:
    """A server with --state."""
    return await start_front(engine, server=ServerConfig(port=0, state=str(tmp_path / "state")))


@pytest.fixture
def client(front: Front) -> openai.AsyncOpenAI:
    return client_of(front.url)
