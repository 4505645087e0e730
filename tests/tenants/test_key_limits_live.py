"""Limits and budgets of keys on the real server: reserved by forecasts, settled by real lengths."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from front import Front, StartFront, until

from llmserve.calls.in_flight import InFlightCall
from llmserve.engines.timed.server import FakeEngine
from llmserve.errors import RateLimited
from llmserve.settings.tree import ServerConfig
from llmserve.tenants.limits import KeyCharge
from llmserve.tenants.usage_file import UsageFile
from llmserve.wire.headers import PREDICTED_HEADER

KEY = {"authorization": "Bearer sk-1"}


def keys_file(tmp_path: Path, of_alice: str, bob: str = "") -> ServerConfig:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nkey = "sk-1"\n{of_alice}\n[keys.bob]\nkey = "sk-2"\n{bob}')
    path.chmod(0o600)
    return ServerConfig(port=0, api_key_file=str(path), usage_file=str(tmp_path / "usage.sqlite"))


async def ask(
    front: Front, tokens: int | None = None, key: dict[str, str] = KEY, **fields: Any
) -> tuple[int, Any, Any]:
    """Status, headers and body of an answer of `tokens` tokens, as the client limits it."""
    limit = {} if tokens is None else {"max_tokens": tokens}
    async with front.post(headers=key, **limit, **fields) as response:
        return response.status, response.headers, await response.json(content_type=None)


class Watch:
    """Records each reserve, what was used of it, and what was free at each refusal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved: dict[int, float] = {}
        self.used: dict[int, float] = {}
        self.refused: list[tuple[float, float]] = []  # needed, free
        reserve, settle = KeyCharge.reserve, KeyCharge.settle

        def watched_reserve(charge: KeyCharge, call: InFlightCall, prompt: float, output: float) -> Any:
            account = charge._account
            bucket = account.key.tokens
            self.reserved[call.request.id] = prompt + output
            free = bucket.level(account.limits.clock()) if bucket is not None else 0.0
            try:
                reserving = reserve(charge, call, prompt, output)
            except RateLimited:
                self._refuse(call, free)
                raise
            return None if reserving is None else asked(reserving, charge, call)

        async def asked(reserving: Awaitable[None], charge: KeyCharge, call: InFlightCall) -> None:
            try:
                await reserving
            except RateLimited:
                self._refuse(call, min(budget.left for budget in charge._account.budgets))
                raise

        def watched_settle(charge: KeyCharge, call: InFlightCall, prompt: float, output: float | None) -> None:
            self.used[call.request.id] = prompt + (output or 0.0)
            settle(charge, call, prompt, output)

        monkeypatch.setattr(KeyCharge, "reserve", watched_reserve)
        monkeypatch.setattr(KeyCharge, "settle", watched_settle)

    def _refuse(self, call: InFlightCall, free: float) -> None:
        self.refused.append((self.reserved.pop(call.request.id), free))

    @property
    def errors(self) -> float:
        """By how much the admitted requests used more than they had reserved."""
        return sum(max(0.0, self.used[id_] - reserved) for id_, reserved in self.reserved.items())


async def test_every_answer_of_a_limited_key_says_what_is_left(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(
            engine, server=keys_file(tmp_path, "requests_per_minute = 9\ntokens_per_minute = 600")
        )
        status, headers, _ = await ask(front, 99)
        assert status == 200
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-limit-tokens"]) == ("9", "600")
        assert headers["x-ratelimit-remaining-requests"] == "8"
        _, headers, _ = await ask(front, key={"authorization": "Bearer sk-2"})
        assert not [name for name in headers if "ratelimit" in name]


async def test_a_refused_client_learns_when_the_bucket_has_its_tokens(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=keys_file(tmp_path, "tokens_per_minute = 600"))
        assert (await ask(front, 500))[0] == 200
        status, headers, body = await ask(front, 300)
        assert (status, body["error"]["code"], body["error"]["type"]) == (429, "tokens_per_minute", "rate_limit_error")
        assert 15 <= int(headers["retry-after"]) <= 22  # 200 tokens and the prompt's, at 10 a second
        assert int(headers["x-ratelimit-remaining-tokens"]) < 110
        assert (await ask(front, 50))[0] == 200  # a request that fits passes
        status, headers, body = await ask(front, 601)
        assert (status, body["error"]["code"]) == (400, "tokens_per_minute")
        assert "retry-after" not in headers


async def test_a_refusal_is_counted_and_leaves_nothing_behind(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=keys_file(tmp_path, "tokens_per_minute = 600"))
        assert (await ask(front, 601))[0] == 400
        async with front.session.get(f"{front.url}/metrics", headers=KEY) as response:
            assert 'llmserve_rejections_total{reason="tokens_per_minute"} 1.0' in await response.text()
        assert await front.cluster.drain(5.0)


async def test_a_claimed_length_reserves_no_less_than_the_limit(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0) as engine:
        front = await start_front(engine, server=keys_file(tmp_path, "tokens_per_minute = 600"))
        assert (await ask(front, 601, {**KEY, PREDICTED_HEADER: "1"}))[0] == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_pays_for_what_was_generated(
    start_front: StartFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with FakeEngine(step_s=0.01) as engine:
        front = await start_front(engine, server=keys_file(tmp_path, "tokens_per_day = 1000"))
        watch = Watch(monkeypatch)
        leaving = asyncio.ensure_future(ask(front, 900, stream=stream))
        await until(lambda: engine.running == 1)
        if stream:
            await until(lambda: any(call.measured.streamed_tokens for call in front.cluster.fleet.running))
        assert (await ask(front, 300))[0] == 429
        leaving.cancel()
        await until(lambda: 1 in watch.used)
        assert 0 < watch.used[1] < 900
        assert (await ask(front, 10))[0] == 200


async def test_a_request_that_never_started_costs_nothing(
    start_front: StartFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeEngine(step_s=0.01) as engine:
        front = await start_front(engine, slots=1, server=keys_file(tmp_path, "tokens_per_day = 1000"))
        watch = Watch(monkeypatch)
        running = asyncio.ensure_future(ask(front, 200))
        await until(lambda: engine.running == 1)
        waiting = asyncio.ensure_future(ask(front, 500))
        await until(lambda: front.cluster.scheduler.waiting == 1)
        waiting.cancel()
        await until(lambda: 2 in watch.used)
        assert watch.used[2] == 0
        running.cancel()


async def test_a_request_that_fails_costs_nothing(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0.001) as engine:
        front = await start_front(engine, server=keys_file(tmp_path, "tokens_per_day = 1000"))
        async with front.session.post(f"{engine.url}/fault", json={"mode": "500"}):
            pass
        assert (await ask(front, 900))[0] == 500
        async with front.session.post(f"{engine.url}/fault", json={"mode": "ok"}):
            pass
        assert (await ask(front, 900))[0] == 200


async def test_retry_after_of_a_full_key_comes_from_the_forecasts(start_front: StartFront, tmp_path: Path) -> None:
    """Before any answer a token is expected to take 0.02 s, so 4,000 tokens take 80 s. The only slot is free then."""
    async with FakeEngine(step_s=0.01, slots=1) as engine:
        front = await start_front(
            engine, slots=1, server=keys_file(tmp_path, "concurrent = 1", bob="tokens_waiting = 500")
        )
        long, bob = {**KEY, PREDICTED_HEADER: "4000"}, {"authorization": "Bearer sk-2", PREDICTED_HEADER: "400"}
        running = asyncio.ensure_future(ask(front, key=long, max_tokens=4_000))
        await until(lambda: engine.running == 1)
        status, headers, body = await ask(front)
        assert (status, body["error"]["code"]) == (429, "concurrent_max")
        assert 60 <= int(headers["retry-after"]) <= 80
        waiting = asyncio.ensure_future(ask(front, key=bob))
        await until(lambda: front.cluster.scheduler.waiting == 1)
        status, headers, body = await ask(front, key=bob)
        assert (status, body["error"]["code"]) == (429, "tokens_waiting")
        assert 60 <= int(headers["retry-after"]) <= 80
        running.cancel()
        assert (await waiting)[0] == 200


# ---- fifty at once -------------------------------------------------------------------------------------------------

LIMIT = 4_000


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize("limit", [f"tokens_per_day = {LIMIT}", f"tokens_per_minute = {LIMIT}"])
async def test_fifty_at_once_overspend_by_no_more_than_their_forecasts_err(
    start_front: StartFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, longer: bool
) -> None:
    """longer : answers are suddenly twice as long as all before. Without reserves, all of the first fifty would be
    admitted, and fifty more before these have ended.
    """
    async with FakeEngine(step_s=0.001, slots=16, output_tokens=50) as engine:
        front = await start_front(engine, slots=16, server=keys_file(tmp_path, limit))
        await asyncio.gather(*[ask(front, key={"authorization": "Bearer sk-2"}) for _ in range(40)])
        engine._output_tokens = 100 if longer else 50
        watch, since_s = Watch(monkeypatch), time.monotonic()

        async def client() -> None:
            for _ in range(3):
                await ask(front)

        await asyncio.gather(*[client() for _ in range(50)])
        await until(lambda: not front.cluster.scheduler.requests)
        refill = LIMIT / 60 * (time.monotonic() - since_s) if "minute" in limit else 0.0
    spent = sum(watch.used.values())
    assert (watch.errors > 0) == longer
    assert 0.9 * LIMIT <= spent <= LIMIT + refill + watch.errors
    assert watch.refused, "150 requests of 51 tokens and more are more than the limit"
    for needed, free in watch.refused:
        assert needed < LIMIT / 10
        assert free < needed, "a request that fits is never refused, and least of all while a tenth is free"


async def test_two_servers_on_one_file_of_budgets_count_all(start_front: StartFront, tmp_path: Path) -> None:
    async with FakeEngine(step_s=0.001, slots=16) as engine:
        server = keys_file(tmp_path, "tokens_per_day = 100_000")
        fronts = [await start_front(engine, slots=16, server=server) for _ in range(2)]
        answers = await asyncio.gather(*[ask(front, 5 + number) for number in range(30) for front in fronts])
        assert {status for status, _, _ in answers} == {200}
        used = sum(body["usage"]["total_tokens"] for _, _, body in answers)
        file = UsageFile(tmp_path / "usage.sqlite")
        today = [f"{datetime.now(UTC) + timedelta(days=days):%Y-%m-%d}" for days in (-1, 0)]
        await until(lambda: abs(sum(file.update({}, today)[0].values()) - used) < 0.01)
        file.close()


async def test_fifty_at_once_on_two_servers_with_one_file_overspend_nothing(
    start_front: StartFront, tmp_path: Path
) -> None:
    """Each may take all of the budget that the other has not taken, and together they take it."""
    limit = 1_000
    async with FakeEngine(step_s=0.001, slots=16) as engine:
        server = keys_file(tmp_path, f"tokens_per_day = {limit}")
        fronts = [await start_front(engine, slots=16, server=server) for _ in range(2)]
        bob = {"authorization": "Bearer sk-2"}
        await asyncio.gather(
            *[ask(front, 20, bob) for _ in range(40) for front in fronts]
        )  # they teach sizes of prompts
        answers = await asyncio.gather(*[ask(front, 20) for _ in range(50) for front in fronts])
        used = sum(body["usage"]["total_tokens"] for status, _, body in answers if status == 200)
        refused = [body["error"]["code"] for status, _, body in answers if status != 200]
    assert set(refused) == {"insufficient_quota"}
    assert 0.9 * limit <= used <= limit
