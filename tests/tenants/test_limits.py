"""Keys and their limits."""

from typing import Any

import pytest
from calls import a_call
from hypothesis import given
from hypothesis import strategies as st
from processor_time import cpu_s

from llmserve.calls.in_flight import InFlightCall
from llmserve.errors import BadRequest, ConfigError, RateLimited, Unauthorized
from llmserve.request import Request
from llmserve.settings.deadlines import DefaultDeadlines
from llmserve.settings.tree import ApiConfig
from llmserve.tenants.authentication import Keys
from llmserve.tenants.buckets import Bucket
from llmserve.tenants.key_file import KeyFile, KeyPolicy, Limits
from llmserve.tenants.limits import Account, KeyCharge, KeyLimits
from predictor.prompt import Prompt


def test_a_key_is_found_as_fast_among_many_as_among_few() -> None:
    def refuse(keys: Keys) -> None:
        for _ in range(300):
            with pytest.raises(Unauthorized):
                keys.authenticate("Bearer wrong")

    few, many = (Keys({f"name{number}": f"sk-{number}" for number in range(count)}) for count in (20, 20_000))
    assert cpu_s(lambda: refuse(many)) < 5 * cpu_s(lambda: refuse(few))


def test_a_right_key_is_admitted_by_its_name() -> None:
    keys = Keys({"alice": "sk-1", "bob": "sk-2"})
    assert keys.authenticate("Bearer sk-2") == "bob"
    assert keys.authenticate("bearer sk-1") == "alice"


@pytest.mark.parametrize("header", [None, "", "sk-1", "Basic sk-1", "Bearer ", "Bearer sk-3", "Bearer sk-1x"])
def test_a_missing_or_wrong_key_is_unauthorized(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        Keys({"alice": "sk-1"}).authenticate(header)


def test_without_keys_every_client_is_admitted() -> None:
    assert Keys({}).authenticate(None) == ""


# ---- limits ----

NOBODY: Any = None  # the client of calls that are never answered


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Times:
    """Waiting requests start in as many seconds as their id says, and run for 7 s.

    one_more_s : `next_start_s` of all
    """

    one_more_s: float | None = None

    def next_start_s(self, request: Request) -> float | None:
        return self.one_more_s

    def start_s(self, call: InFlightCall) -> float | None:
        return 0.0 if call.receipt is not None else float(call.request.id)

    def end_s(self, call: InFlightCall) -> float | None:
        start_s = self.start_s(call)
        return None if start_s is None else start_s + 7.0


def limits_of(limits: Limits | None = None, clock: Clock | None = None, **policy: Any) -> KeyLimits:
    """Of a single key, alice."""
    own = KeyPolicy(limits=limits or Limits(), **policy)
    file = KeyFile(keys={"alice": "sk-1"}, policies={"alice": own})
    return KeyLimits(file, times=Times(), clock=clock or Clock())


def call_of(model: str = "m", id_: int = 1) -> InFlightCall:
    return InFlightCall(a_call("/v1/completions", b"", Prompt("", model), stream=False), id_, NOBODY)


def charged(
    account: Account, prompt: float, output: float, model: str = "m", id_: int = 1
) -> tuple[KeyCharge, InFlightCall]:
    charge, call = account.charge(model), call_of(model, id_)
    assert charge is not None
    charge.reserve(call, prompt, output)
    return charge, call


def test_a_key_has_a_limit_of_requests_in_progress() -> None:
    limits = limits_of(Limits(concurrent=2))
    first = limits.acquire("alice")
    limits.acquire("alice")
    with pytest.raises(RateLimited, match="2 requests in progress"):
        limits.acquire("alice")
    first.release()
    limits.acquire("alice")


def test_all_clients_without_a_key_share_the_servers_limits() -> None:
    limits = KeyLimits(KeyFile(), Limits(concurrent=1))
    limits.acquire("")
    with pytest.raises(RateLimited):
        limits.acquire("")


def test_keys_do_not_share_a_limit() -> None:
    limits = KeyLimits(KeyFile(keys={"alice": "sk-1", "bob": "sk-2"}), Limits(concurrent=1))
    limits.acquire("alice")
    limits.acquire("bob")


def test_a_key_has_a_limit_of_requests_per_minute_with_retry_after() -> None:
    clock = Clock()
    limits = limits_of(Limits(requests_per_minute=30), clock)
    for _ in range(30):
        limits.acquire("alice").release()
    with pytest.raises(RateLimited) as refusal:
        limits.acquire("alice")
    assert refusal.value.retry_after_s == pytest.approx(2.0)
    clock.now_s = 2.0
    limits.acquire("alice").release()
    with pytest.raises(RateLimited):
        limits.acquire("alice")


def test_a_key_without_limits_has_no_charge_and_no_headers() -> None:
    account = limits_of().acquire("alice")
    assert account.charge("m") is None
    assert account.headers("m") == ()


def test_tokens_are_reserved_and_the_difference_comes_back() -> None:
    account = limits_of(Limits(tokens_per_minute=1_000)).acquire("alice")
    charge, call = charged(account, 100, 500)
    assert dict(account.headers("m"))[b"x-ratelimit-remaining-tokens"] == b"400"
    with pytest.raises(RateLimited, match="1,000 tokens per minute, and this request probably needs 401"):
        charged(account, 1, 400)
    charge.settle(call, 100, 50)
    charged(account, 350, 500)


def test_all_of_an_answer_without_a_count_was_used() -> None:
    account = limits_of(Limits(tokens_per_minute=1_000)).acquire("alice")
    charge, call = charged(account, 100, 500)
    charge.settle(call, 100, None)
    assert dict(account.headers("m"))[b"x-ratelimit-remaining-tokens"] == b"400"


def test_a_longer_answer_than_reserved_is_a_debt_that_the_refill_pays() -> None:
    clock = Clock()
    account = limits_of(Limits(tokens_per_minute=600), clock).acquire("alice")
    charge, call = charged(account, 0, 600)
    charge.settle(call, 0, 700)
    with pytest.raises(RateLimited) as refusal:
        charged(account, 0, 50)
    assert refusal.value.retry_after_s == pytest.approx(15.0)  # 150 tokens at 10 a second
    clock.now_s = 15.0
    charged(account, 0, 50)


@pytest.mark.parametrize(("one_more_s", "expected"), [(None, 15.0), (9.0, 15.0), (40.0, 40.0)])
def test_retry_after_of_an_empty_bucket_is_the_later_of_its_refill_and_the_keys_next_start(
    one_more_s: float | None, expected: float
) -> None:
    limits = limits_of(Limits(tokens_per_minute=600))
    limits.times = times = Times()
    times.one_more_s = one_more_s
    account = limits.acquire("alice")
    charged(account, 0, 600)
    with pytest.raises(RateLimited) as refusal:
        charged(account, 0, 150)
    assert refusal.value.retry_after_s == pytest.approx(expected)


def test_retry_after_of_too_many_requests_a_minute_is_no_earlier_than_the_keys_next_start() -> None:
    limits = limits_of(Limits(requests_per_minute=30, tokens_waiting=1_000))
    limits.times = times = Times()
    for _ in range(30):
        charged(limits.acquire("alice"), 0, 1)
    times.one_more_s = 40.0
    with pytest.raises(RateLimited) as refusal:
        limits.acquire("alice")
    assert refusal.value.retry_after_s == pytest.approx(40.0)


def test_a_request_larger_than_the_bucket_is_no_matter_of_time() -> None:
    account = limits_of(Limits(tokens_per_minute=1_000)).acquire("alice")
    with pytest.raises(BadRequest, match="may need 1,100 tokens, but this key may use 1,000 tokens per minute"):
        charged(account, 100, 1_000)


def test_a_refused_request_reserves_nothing() -> None:
    """The bucket of the model refuses: the bucket of the key keeps its tokens."""
    limits = limits_of(Limits(tokens_per_minute=1_000), models={"m": Limits(tokens_per_minute=100)})
    account = limits.acquire("alice")
    with pytest.raises(BadRequest, match="this key on m may use 100 tokens per minute"):
        charged(account, 0, 101)
    charged(account, 0, 1_000, model="other")


def test_a_key_has_limits_of_single_models() -> None:
    limits = limits_of(models={"m": Limits(requests_per_minute=1), "n": Limits(concurrent=1)})
    account = limits.acquire("alice")
    charged(account, 1, 1)
    with pytest.raises(RateLimited, match="this key on m may send 1 requests per minute"):
        charged(account, 1, 1)
    charge, call = charged(account, 1, 1, model="n")
    with pytest.raises(RateLimited, match="this key on n has 1 requests in progress"):
        charged(account, 1, 1, model="n")
    charge.settle(call, 1, 1)
    charged(account, 1, 1, model="n")
    charged(account, 1, 1, model="o")


def test_waiting_tokens_are_limited_until_their_requests_start() -> None:
    account = limits_of(Limits(tokens_waiting=100)).acquire("alice")
    first, _ = charged(account, 0, 500)  # alone, any request may wait
    with pytest.raises(RateLimited) as refusal:
        charged(account, 0, 10)
    assert refusal.value.code == "tokens_waiting"
    first.started()
    second, call = charged(account, 0, 60)
    charged(account, 0, 40)
    second.settle(call, 0, 0)  # cancelled while it waited
    charged(account, 0, 60)


def test_retry_after_of_waiting_tokens_is_when_enough_have_started() -> None:
    """They start in 20, 30 and 50 s."""
    limits = limits_of(Limits(tokens_waiting=100))
    account = limits.acquire("alice")
    for id_, tokens in ((50, 40), (20, 30), (30, 30)):
        charged(account, 0, tokens, id_=id_)
    for tokens, start_s in ((30, 20.0), (31, 30.0), (60, 30.0), (61, 50.0), (500, 50.0)):
        with pytest.raises(RateLimited) as refusal:
            charged(account, 0, tokens)
        assert refusal.value.retry_after_s == start_s


def test_retry_after_of_a_full_key_is_when_its_first_request_ends() -> None:
    clock = Clock()
    limits = limits_of(Limits(concurrent=2), clock)
    account = limits.acquire("alice")
    limits.acquire("alice")

    def retry_after_s() -> float | None:
        with pytest.raises(RateLimited) as refusal:
            limits.acquire("alice")
        return refusal.value.retry_after_s

    assert retry_after_s() == 1.0, "their bodies have not arrived"
    _, call = charged(account, 1, 1, id_=40)
    charged(account, 1, 1, id_=50)
    assert retry_after_s() == 47.0, "both wait"
    clock.now_s = 0.5
    call.receipt = object()  # type: ignore[assignment]
    assert retry_after_s() == 46.5, "a prediction is kept for a second"
    clock.now_s = 1.0
    assert retry_after_s() == 7.0


def test_headers_show_what_is_left_of_the_narrower_bucket() -> None:
    limits = limits_of(
        Limits(requests_per_minute=60, tokens_per_minute=6_000), models={"m": Limits(tokens_per_minute=600)}
    )
    account = limits.acquire("alice")
    charged(account, 0, 60)
    assert dict(account.headers("m")) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1.000s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"540",
        b"x-ratelimit-reset-tokens": b"6.000s",
    }
    assert dict(account.headers("n"))[b"x-ratelimit-remaining-tokens"] == b"5940"


def test_a_refusal_has_the_headers_too() -> None:
    limits = limits_of(Limits(requests_per_minute=1))
    limits.acquire("alice")
    with pytest.raises(RateLimited) as refusal:
        limits.acquire("alice")
    assert dict(refusal.value.headers)[b"x-ratelimit-remaining-requests"] == b"0"


def test_a_bucket_never_holds_more_than_its_size_and_keeps_its_debt_when_resized() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(-100.0, 0.0)
    assert bucket.level(1_000.0) == 60.0
    bucket.take(50.0, 1_000.0)
    bucket.resize(30, 1_000.0)
    assert bucket.level(1_000.0) == -20.0
    bucket.resize(120, 1_000.0)
    assert bucket.level(1_000.0) == 70.0


@given(
    st.lists(
        st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 150.0), st.floats(0.0, 300.0), st.floats(0.0, 20.0)), max_size=40
    )
)
def test_a_bucket_gives_no_more_than_its_size_its_refill_and_its_forecasts_errors(
    requests: list[tuple[float, float, float, float]],
) -> None:
    """requests : seconds since the last, tokens reserved and used, seconds until the end"""
    bucket, now_s, used, errors = Bucket(100, 0.0), 0.0, 0.0, 0.0
    ends: list[tuple[float, float]] = []  # time, and what is given back
    for pause_s, reserved, real, runs_s in requests:
        now_s += pause_s
        for end_s, back in sorted(end for end in ends if end[0] <= now_s):
            bucket.take(-back, end_s)
        ends = [end for end in ends if end[0] > now_s]
        free = bucket.level(now_s)
        if wait_s := bucket.wait_s(reserved, now_s):
            assert free < reserved, "a request that fits is refused"
            assert wait_s == pytest.approx((reserved - free) * 60 / 100)
            continue
        bucket.take(reserved, now_s)
        ends.append((now_s + runs_s, reserved - real))
        used, errors = used + real, errors + max(0.0, real - reserved)
        assert used <= 100 + now_s * 100 / 60 + errors + 1e-6


# ---- changed while serving ----


def test_a_changed_file_changes_limits_and_keeps_what_counts() -> None:
    limits = limits_of(Limits(requests_per_minute=10, concurrent=5))
    account = limits.acquire("alice")
    policy = KeyPolicy(weight=3.0, limits=Limits(requests_per_minute=2, concurrent=5))
    limits.change(KeyFile(keys={"alice": "sk-9"}, policies={"alice": policy}), Limits())
    assert limits.keys.authenticate("Bearer sk-9") == "alice"
    assert limits.account("alice").policy.weight == 3.0
    limits.acquire("alice")
    with pytest.raises(RateLimited, match="2 requests per minute"):
        limits.acquire("alice")
    account.release()


def test_requests_of_a_removed_key_end_normally() -> None:
    limits = limits_of(Limits(tokens_per_minute=100))
    account = limits.acquire("alice")
    charge, call = charged(account, 1, 1)
    limits.change(KeyFile(keys={"bob": "sk-2"}), Limits())
    with pytest.raises(Unauthorized):
        limits.keys.authenticate("Bearer sk-1")
    assert limits.account("alice") is account
    charge.settle(call, 1, 1)
    account.release()
    limits.change(KeyFile(keys={"bob": "sk-2"}), Limits())
    assert [account.name for account in limits.accounts] == ["bob"]


# ---- default deadlines ----


def test_default_deadlines_are_looked_up_by_key_then_stream_then_model() -> None:
    deadlines = DefaultDeadlines(("5000", "model:org/a:8b=2e3", "stream:chat=1000", "key:batch=60000"))
    assert deadlines.slo_s("batch", "chat", "org/a:8b") == 60
    assert deadlines.slo_s("alice", "chat", "org/a:8b") == 1
    assert deadlines.slo_s("alice", "alice", "org/a:8b") == 2
    assert deadlines.slo_s("alice", "alice", "other") == 5


def test_without_a_matching_default_there_is_no_deadline() -> None:
    assert DefaultDeadlines(()).slo_s("", "", "m") is None
    assert DefaultDeadlines(("key:batch=1", "stream:chat=1", "model:a=1")).slo_s("", "", "b") is None


@pytest.mark.parametrize(
    "text",
    [
        "soon",
        "0",
        "-1",
        "1e9",
        "nan",
        "=5",
        "batch=5",
        "keys:batch=5",
        "key:=5",
        "stream:=5",
        "key=5",
        "model:a",
        "model:a=",
    ],
)
def test_a_malformed_default_deadline_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ApiConfig(slo_ms=("5000", text))


def test_two_default_deadlines_for_one_key_are_an_error() -> None:
    with pytest.raises(ConfigError, match="key:a=2"):
        ApiConfig(slo_ms=("key:a=1", "key:a=2"))
