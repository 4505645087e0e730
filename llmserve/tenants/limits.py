"""The limits of each key."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Protocol
from urllib.parse import unquote

from llmserve.calls.in_flight import InFlightCall
from llmserve.errors import BadRequest, RateLimited, RequestError
from llmserve.estimates.of_key import CallTimes, KeyEstimates
from llmserve.request import Request
from llmserve.tenants.authentication import Keys
from llmserve.tenants.buckets import Headers, Scope, limit_headers
from llmserve.tenants.budgets import Budget, Ledger, budgets_of
from llmserve.tenants.key_file import KeyFile, KeyPolicy, Limits, Price
from llmserve.tenants.tokens import PREFIX, Tokens
from llmserve.tenants.usage_file import Reserve

NONE = Limits()
TOKEN_ACCOUNTS_MAX = 10_000  # accounts of tokens whose limits are remembered
RETRY_AFTER_S = 1.0  # while nothing tells when a request ends: its body is still arriving


class UsageCounts(Protocol):
    """Counts what keys use; see usage.py."""

    def refused(self, key: str, model: str) -> None:
        """model : "": not known yet"""
        ...

    def joules_per_token(self, model: str) -> float | None: ...

    def ended(
        self, key: str, model: str, request_id: int, prompt_tokens: float, output_tokens: float, money: float
    ) -> None: ...

    def shown(self) -> list[dict[str, Any]]: ...


class KeyLimits:
    """Enforces the limits of each key, and says what a key may ask for.

    defaults    limits of every key that has none of its own; also of all clients together when no key is required
    ledger      what keys have spent of their budgets; None: no key has a budget
    times       predicts when requests start and end; None: nothing is predicted
    usage       counts what keys use; None: nothing is counted
    on_refused  called with the code of an error for a call that had already been parsed
    part        of the limits that this server may use at first, where several servers share the keys
    tokens      that clients may send in place of a key; None: none
    """

    def __init__(
        self,
        file: KeyFile,
        defaults: Limits = NONE,
        *,
        ledger: Ledger | None = None,
        times: CallTimes | None = None,
        usage: UsageCounts | None = None,
        on_refused: Callable[[str], None] = lambda code: None,
        part: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        tokens: Tokens | None = None,
    ) -> None:
        self.keys = Keys({}, tokens)
        self.prices: Mapping[str, Price] = MappingProxyType({})
        self.times, self.usage, self.on_refused, self.clock = times, usage, on_refused, clock
        self.ledger = ledger
        self._first_quota = part
        self.quota_of: dict[str, float] = {}  # of the limits, by key: what other servers use is not this one's
        self._accounts: dict[str, Account] = _Accounts(self._of_token)
        self._defaults: Limits | None = None
        self._tenants: Mapping[str, KeyPolicy] = MappingProxyType({})
        self.change(file, defaults)

    def change(self, file: KeyFile, defaults: Limits) -> None:
        """Take other keys and limits. What counts against the limits of a key that stays, stays.

        Requests of a removed key that are in progress end normally.
        """
        for name in file.keys or ("",):
            policy = file.policies.get(name, KeyPolicy())
            account = self._accounts.get(name)
            if account is None:
                self.quota_of.setdefault(name, self._first_quota)
            if account is None or defaults != self._defaults or policy != account.policy:
                account = account or self._accounts.setdefault(name, Account(name, self))
                account.change(policy, policy.limits.over(defaults), self.ledger)
        self._tenants = file.tenants
        for name in [name for name, account in self._accounts.items() if name not in (file.keys or ("",))]:
            if name.startswith(PREFIX):
                self._follow_tenant(self._accounts[name], defaults)
            elif not self._accounts[name].key.running:
                del self._accounts[name]
        self.keys.replace(file.keys)
        if self.keys.tokens is not None:
            self.keys.tokens.allow(frozenset(file.tenants) if file.tenants else None)
        self.prices, self._defaults = file.prices, defaults

    def _of_token(self, name: str) -> Account:
        """A new account of tokens. The first idle ones make room for it."""
        accounts = [each for each, account in self._accounts.items() if each.startswith(PREFIX)]
        if len(accounts) >= TOKEN_ACCOUNTS_MAX:
            idle = (each for each in accounts if not self._accounts[each].key.running)
            for each in list(islice(idle, TOKEN_ACCOUNTS_MAX // 10)):
                del self._accounts[each]
        account = self._accounts[name] = Account(name, self)
        self.quota_of.setdefault(name, self._first_quota)
        self._follow_tenant(account, self._defaults or NONE)
        return account

    def _follow_tenant(self, account: Account, defaults: Limits) -> None:
        policy = self._tenants.get(unquote(account.name.removeprefix(PREFIX)), KeyPolicy())
        account.change(policy, policy.limits.over(defaults), self.ledger)

    def use_quotas(self, quotas: Mapping[str, float]) -> None:
        """Use other quotas. quotas : parts of the limits, 0 to 1, by key; keys that are not here are left out"""
        for name, quota in quotas.items():
            account = self._accounts.get(name)
            if account is not None and quota != self.quota_of.get(name):
                self.quota_of[name] = quota
                account.resize()

    def asked(self) -> dict[str, int]:
        """Requests of each limited key since the last call, also refused ones."""
        asked = {
            name: account.asked for name, account in self._accounts.items() if account.asked and account.is_limited
        }
        for name in asked:
            self._accounts[name].asked = 0
        return asked

    @property
    def accounts(self) -> Iterable[Account]:
        return self._accounts.values()

    def acquire(self, name: str) -> Account:
        """Count a new request of a key. Every `acquire` that returns needs a `release`. Raises RateLimited."""
        account = self._accounts[name]
        account.asked += 1
        if account.is_limited:
            try:
                account.check_request(account.key, "")
            except RateLimited:
                account.count_refused("")
                raise
            if account.key.requests is not None:
                account.key.requests.take(1.0, self.clock())
        account.key.running += 1
        return account

    def acquire_again(self, name: str) -> Account:
        """Count a request that an earlier process of this server has counted, and so admitted. Raises KeyError."""
        account = self._accounts[name]
        account.key.running += 1
        return account

    def account(self, name: str) -> Account:
        """name : of a key with a request in progress"""
        return self._accounts[name]


class _Accounts(dict[str, "Account"]):
    """Accounts by name. That of a token is made when it is first asked for. make : an account of tokens"""

    def __init__(self, make: Callable[[str], Account]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Account:
        if not name.startswith(PREFIX):
            raise KeyError(name)
        return self._make(name)


class Account:
    """What counts against the limits of one key.

    policy      what the key may ask for
    key         limits of the key, for all models
    is_limited  whether the key has any limit or budget
    charges     of the key's calls in flight
    last        the key's last request whose model and share are known; None: none has come yet
    asked       requests so far, see KeyLimits.asked
    """

    def __init__(self, name: str, limits: KeyLimits) -> None:
        self.name = name
        self.limits = limits
        self.policy = KeyPolicy()
        self.key = Scope("this key", Limits(), limits.clock())
        self.budgets: tuple[Budget, ...] = ()
        self.is_limited = self._shows_limits = False
        self.charges: set[KeyCharge] = set()
        self.last: Request | None = None
        self.asked = 0
        self._limits = Limits()
        self._estimates = KeyEstimates(limits.times, limits.clock)
        self._models: dict[str, Scope] = {}

    def change(self, policy: KeyPolicy, limits: Limits, ledger: Ledger | None) -> None:
        """Take another policy. limits : of the key, with the server's defaults"""
        now_s = self.limits.clock()
        self.policy = policy
        self.budgets = budgets_of(self.name, policy.budgets, ledger, self.budgets) if ledger is not None else ()
        self._limits = limits
        before = self._models
        self._models = {
            model: before.get(model) or Scope(f"this key on {model}", of_model, now_s, self._part)
            for model, of_model in policy.models.items()
        }
        self.resize()
        scopes = (self.key, *self._models.values())
        self.is_limited = bool(self.budgets) or any(scope.limits_anything for scope in scopes)
        self._shows_limits = any(scope.requests or scope.tokens for scope in scopes)

    @property
    def _part(self) -> float:
        return self.limits.quota_of.get(self.name, 1.0)

    def resize(self) -> None:
        """Take this server's part of the limits; what counts against them stays."""
        now_s, part = self.limits.clock(), self._part
        self.key.change(self._limits, now_s, part)
        for model, scope in self._models.items():
            scope.change(self.policy.models[model], now_s, part)

    def release(self) -> None:
        """Note that a request has ended."""
        self.key.running -= 1

    def charge(self, model: str) -> KeyCharge | None:
        """What a call uses of the limits; None: nothing counts it."""
        if not self.is_limited and self.limits.usage is None:
            return None
        return KeyCharge(self, model)

    def named_charge(self, model: str, name: str, *, again: bool) -> KeyCharge | None:
        """The same, with reserves under a name, which outlive this process. again : an earlier process has made it"""
        if not self.is_limited and self.limits.usage is None:
            return None
        return AdmittedCharge(self, model, name) if again else NamedCharge(self, model, name)

    def scopes(self, model: str) -> tuple[Scope, ...]:
        scope = self._models.get(model)
        return (self.key,) if scope is None else (self.key, scope)

    def headers(self, model: str) -> Headers:
        """OpenAI's headers on the limits by the minute, of the key or of the key and the model, whichever has less."""
        if not self._shows_limits:
            return ()
        now_s, scopes = self.limits.clock(), self.scopes(model)
        buckets = ((b"requests", [scope.requests for scope in scopes]), (b"tokens", [scope.tokens for scope in scopes]))
        headers: list[tuple[bytes, bytes]] = []
        for unit, limiting in buckets:
            if found := [bucket for bucket in limiting if bucket is not None]:
                least = found[0] if len(found) == 1 else min(found, key=lambda bucket: bucket.level(now_s))
                headers += limit_headers(unit, least, now_s)
        return tuple(headers)

    def count_refused(self, model: str) -> None:
        if self.limits.usage is not None:
            self.limits.usage.refused(self.name, model)

    # ---- checks ----

    def check_request(self, scope: Scope, model: str) -> None:
        """Raise RateLimited if one more request exceeds the scope. model : "": of every model"""
        if scope.concurrent and scope.running >= scope.concurrent:
            raise self._refusal(
                f"{scope.who} has {scope.running} requests in progress, the most allowed",
                code="concurrent_max",
                retry_after_s=self._first_end_s(model),
                model=model,
            )
        if scope.requests is not None and (wait_s := scope.requests.wait_s(1.0, self.limits.clock())):
            raise self._refusal(
                f"{scope.who} may send {scope.requests.limit} requests per minute",
                code="requests_per_minute",
                retry_after_s=max(wait_s, self._next_start_s()),
                model=model,
            )

    def check_tokens(self, scope: Scope, model: str, tokens: float) -> None:
        """Raise RateLimited if so many tokens exceed the scope now; BadRequest if they always will."""
        if (bucket := scope.tokens) is not None:
            if tokens > bucket.limit:
                raise _too_large(tokens, f"{scope.who} may use {bucket.limit:,} tokens per minute", "tokens_per_minute")
            if wait_s := bucket.wait_s(tokens, self.limits.clock()):
                raise self._refusal(
                    f"{scope.who} may use {bucket.limit:,} tokens per minute, and this request probably needs "
                    f"{tokens:,.0f}",
                    code="tokens_per_minute",
                    retry_after_s=max(wait_s, self._next_start_s()),
                    model=model,
                )
        most, waiting = scope.tokens_waiting, scope.waiting_tokens
        if most and waiting and waiting + tokens > most:  # a request that waits alone may have any size
            raise self._refusal(
                f"{scope.who} has requests of {waiting:,.0f} tokens waiting; at most {most:,} may wait",
                code="tokens_waiting",
                retry_after_s=self._room_s("" if scope is self.key else model, waiting + tokens - most),
                model=model,
            )

    def check_budgets(self, model: str, tokens: float, money: float) -> None:
        """Raise BadRequest if the request will always exceed a budget."""
        for budget in self.budgets:
            if budget.unit == "money" and model not in self.limits.prices:
                raise BadRequest(
                    f"this key has a budget of money, and the model {model!r} has no price", code="no_price"
                )
            if (tokens if budget.unit == "tokens" else money) > budget.limit:
                raise _too_large(tokens, f"{budget} is this key's whole budget", "insufficient_quota")

    def over_budget(self, model: str, reserves: Sequence[tuple[Budget, Reserve]]) -> RateLimited:
        """The refusal of a request whose reserves did not fit."""
        budget, reserve = min(reserves, key=lambda pair: pair[0].left - pair[1].amount)
        comes_back = reserve.amount <= budget.left + budget.reserved  # of requests in flight that need less
        return self._refusal(
            f"this key has {budget.shown(max(0.0, budget.left))} left of its budget of {budget}, and this "
            f"request may need {budget.shown(reserve.amount)}",
            code="insufficient_quota",
            retry_after_s=self._first_end_s("") if comes_back else budget.renewed_in_s,
            model=model,
        )

    def _refusal(self, message: str, *, code: str, retry_after_s: float, model: str) -> RateLimited:
        error = RateLimited(message, code=code, retry_after_s=retry_after_s)
        error.headers = self.headers(model)
        return error

    # ---- predictions ----

    def _next_start_s(self) -> float:
        """Predicted seconds until one more request like the key's last would start; 0: unknown."""
        times = self.limits.times
        return (times.next_start_s(self.last) if times is not None and self.last is not None else None) or 0.0

    def _first_end_s(self, model: str) -> float:
        """Predicted seconds until one of the key's requests ends. model : "": of any model"""
        calls = (charge.call for charge in self.charges if model in ("", charge.model))
        left_s = self._estimates.first_end_s(model, calls)
        return RETRY_AFTER_S if left_s is None else left_s

    def _room_s(self, model: str, tokens: float) -> float:
        """Predicted seconds until so many of the key's waiting tokens have started. model : "": of any model"""
        waiting = (
            (charge.call, charge.tokens) for charge in self.charges if charge.waits and model in ("", charge.model)
        )
        room_s = self._estimates.room_s(model, tokens, waiting)
        return RETRY_AFTER_S if room_s is None else room_s


def _too_large(tokens: float, limit: str, code: str) -> BadRequest:
    return BadRequest(
        f"this request may need {tokens:,.0f} tokens, but {limit}: send a smaller `max_tokens` or a shorter prompt",
        param="max_tokens",
        code=code,
    )


class KeyCharge:
    """What one call holds of the limits and budgets of its key, from its arrival to its end.

    tokens  reserved.  waits : whether these count as waiting
    name    of what is reserved of budgets; "": none
    """

    name = ""

    __slots__ = ("_account", "_budgets", "_output_tokens", "_scopes", "_settled", "call", "model", "tokens", "waits")

    call: InFlightCall  # from `reserve` on

    def __init__(self, account: Account, model: str) -> None:
        self._account, self.model = account, model
        self._scopes: tuple[Scope, ...] = ()
        self._budgets: list[tuple[Budget, Reserve]] = []
        self._settled = False
        self.tokens = self._output_tokens = 0.0
        self.waits = False

    def reserve(
        self, in_flight: InFlightCall, prompt_tokens: float, output_tokens: float
    ) -> Coroutine[Any, Any, None] | None:
        account, tokens = self._account, prompt_tokens + output_tokens
        self.call, self.tokens, self._output_tokens = in_flight, tokens, output_tokens
        account.last = in_flight.request
        money = self._money(prompt_tokens, output_tokens)
        if account.is_limited:
            try:
                self._check(tokens, money)
            except RequestError as error:
                self._count_refused(error)
                raise
            self._take(tokens)
        account.charges.add(self)
        return self._reserve_budgets(tokens, money) if account.budgets else None

    def _reserve_budgets(self, tokens: float, money: float) -> Coroutine[Any, Any, None] | None:
        return self._ask_budgets(tokens, money)

    def _count_refused(self, error: RequestError) -> None:
        self._account.limits.on_refused(error.code or error.type)
        self._account.count_refused(self.model)

    async def _ask_budgets(self, tokens: float, money: float) -> None:
        """Reserve what the call needs of the budgets, all or nothing. Raises RateLimited."""
        account, ledger = self._account, self._account.limits.ledger
        assert ledger is not None, "a budget has a ledger"
        amounts = [(budget, tokens if budget.unit == "tokens" else money) for budget in account.budgets]
        reserves = [(budget, self._reserve_of(budget, amount)) for budget, amount in amounts]
        if await ledger.reserve([reserve for _, reserve in reserves], self.name):
            for budget, reserve in reserves:
                budget.reserved += reserve.amount
            self._budgets = reserves
            if self._settled:
                self._settle_late()
        elif not self._settled:
            self._give_back(0.0)
            for scope in self._scopes[1:]:
                if scope.requests is not None:
                    scope.requests.take(-1.0, account.limits.clock())
            error = account.over_budget(self.model, reserves)
            self._count_refused(error)
            raise error

    def _reserve_of(self, budget: Budget, amount: float) -> Reserve:
        return budget.reserve_of(amount)

    def _settle_late(self) -> None:
        """Settle what was reserved after the end: the client had left meanwhile."""
        self._settle_budgets(0.0, 0.0)

    def _check(self, tokens: float, money: float) -> None:
        account, scopes = self._account, self._account.scopes(self.model)
        for scope in scopes[1:]:  # the key itself was checked when the request came
            account.check_request(scope, self.model)
        for scope in scopes:
            account.check_tokens(scope, self.model, tokens)
        account.check_budgets(self.model, tokens, money)

    def _take(self, tokens: float) -> None:
        account, now_s = self._account, self._account.limits.clock()
        self._scopes, self.waits = account.scopes(self.model), True
        for scope in self._scopes[1:]:
            scope.running += 1
            if scope.requests is not None:
                scope.requests.take(1.0, now_s)
        for scope in self._scopes:
            scope.waiting_tokens += tokens
            if scope.tokens is not None:
                scope.tokens.take(tokens, now_s)

    def started(self) -> None:
        if self.waits:
            self.waits = False
            for scope in self._scopes:
                scope.waiting_tokens -= self.tokens

    def settle(self, in_flight: InFlightCall, prompt_tokens: float, output_tokens: float | None) -> None:
        account = self._account
        output = self._output_tokens if output_tokens is None else output_tokens
        used, money = prompt_tokens + output, self._money(prompt_tokens, output)
        self._give_back(used)
        self._settle_budgets(used, money)
        if account.limits.usage is not None:
            account.limits.usage.ended(account.name, self.model, in_flight.request.id, prompt_tokens, output, money)

    def _give_back(self, used: float) -> None:
        """Give back what was not used of the limits. used : tokens"""
        self._settled = True
        self.started()
        self._account.charges.discard(self)
        for scope in self._scopes[1:]:
            scope.running -= 1
        for scope in self._scopes:
            if scope.tokens is not None:
                scope.tokens.take(used - self.tokens, self._account.limits.clock())

    def _settle_budgets(self, tokens: float, money: float) -> None:
        for budget, reserve in self._budgets:
            budget.settle(reserve, tokens if budget.unit == "tokens" else money)

    def _money(self, prompt_tokens: float, output_tokens: float) -> float:
        price = self._account.limits.prices.get(self.model)
        return price.of(prompt_tokens, output_tokens) if price is not None else 0.0


class NamedCharge(KeyCharge):
    """What a call holds whose answer may outlive this process: what is reserved of budgets has a name."""

    __slots__ = ("name",)

    def __init__(self, account: Account, model: str, name: str) -> None:
        super().__init__(account, model)
        self.name = name

    def _settle_budgets(self, tokens: float, money: float) -> None:
        super()._settle_budgets(tokens, money)
        if self._budgets:
            self._ledger.end(self.name)

    @property
    def _ledger(self) -> Ledger:
        ledger = self._account.limits.ledger
        assert ledger is not None, "a budget has a ledger"
        return ledger


class AdmittedCharge(NamedCharge):
    """What a call holds that an earlier process of this server has admitted: it is not refused.

    It may run already, and so end before its reserve is written.
    """

    __slots__ = ("_used",)

    def __init__(self, account: Account, model: str, name: str) -> None:
        super().__init__(account, model, name)
        self._used = 0.0, 0.0

    def _check(self, tokens: float, money: float) -> None:
        return

    def _reserve_budgets(self, tokens: float, money: float) -> Coroutine[Any, Any, None] | None:
        """Take over what the earlier process has reserved, or reserve whatever is left."""
        reserved = self._ledger.take_over(self.name)
        for entry, amount in reserved:
            budget = next((budget for budget in self._account.budgets if budget.has(entry)), None)
            if budget is None:  # it has been removed since
                self._ledger.add(entry, -amount)
                continue
            budget.reserved += amount
            self._budgets.append((budget, Reserve(entry, amount, math.inf)))
        return None if reserved else super()._reserve_budgets(tokens, money)

    def _reserve_of(self, budget: Budget, amount: float) -> Reserve:
        return budget.reserve_of(amount)._replace(limit=math.inf)

    def _settle_budgets(self, tokens: float, money: float) -> None:
        self._used = tokens, money
        super()._settle_budgets(tokens, money)

    def _settle_late(self) -> None:
        self._settle_budgets(*self._used)
