"""Releases and orders by name; MODULE:FUNCTION names a custom order."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from llmserve.errors import ConfigError
from llmserve.scheduling.choice.orders import (
    Clockwork,
    FixedOrder,
    Flex,
    MomentOrder,
    Order,
    arrival,
    boosted,
    due_at_s,
    edf,
    fffs,
    mean_turn,
    shortest,
    turn,
)
from llmserve.scheduling.rates import Arrivals
from llmserve.scheduling.release import Deadline, Full, Greedy, Rate, Release, Table, Timeout, Window

if TYPE_CHECKING:
    from llmserve.settings.policies import SchedulingConfig

TIMEOUT_S = 0.05
PATIENCE = 12.0
RATE_WAIT_S = 1.0  # BatchMonitor's window


def _shortest(config: SchedulingConfig) -> Order:
    patience = PATIENCE if config.patience is None else config.patience
    return FixedOrder(shortest(patience), turn(patience))


ORDERS: dict[str, Callable[[SchedulingConfig], Order]] = {
    "fffs": lambda config: FixedOrder(fffs, arrival),
    "shortest": _shortest,
    "boost": lambda config: FixedOrder(mean_turn(boosted), boosted, follows_load=True),
    "edf": lambda config: FixedOrder(edf, due_at_s),
    "flex": lambda config: Flex(
        None if config.preemption == "off" else config.preemption_factor, config.preemption == "if-needed"
    ),
    "clockwork": lambda config: Clockwork(),
}
"""Constructors of the built-in orders, by name."""
ORDER_SETTINGS = {"shortest": ("patience",)}
"""Settings, besides the name, of orders with fixed keys."""


def order_of(config: SchedulingConfig) -> Order:
    """Return the order that a resolved configuration names: one of ORDERS, or a custom order MODULE:FUNCTION.

    Raises ConfigError when the order does not exist.
    """
    assert config.order is not None, "resolve the configuration first"
    make = ORDERS.get(config.order)
    return make(config) if make is not None else custom_order(config.order)


def custom_order(name: str) -> Order:
    """Load a custom order. name : MODULE:FUNCTION, a function without arguments, or a class, that returns an order.
    The current folder is searched, too.

    Raises ConfigError when the module cannot be imported, or the function is missing or fails.
    """
    module, _, function = name.partition(":")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        order = getattr(importlib.import_module(module), function)()
    except Exception as error:  # the module may raise any exception
        raise ConfigError(f"order {name}: {type(error).__name__}: {error}") from error
    if not isinstance(order, FixedOrder | MomentOrder):
        raise ConfigError(
            f"order {name}: {function}() returns a {type(order).__name__}, not a FixedOrder or MomentOrder"
        )
    return order


def release_of(config: SchedulingConfig, arrivals: Arrivals) -> Release:
    """Create the release that a resolved configuration names, for one model with its arrivals.

    Raises ValueError on settings that have no effect in the release, or that contradict the release.
    """
    assert config.release is not None, "resolve the configuration first"
    size, (kind, _, static) = config.full_batch, config.release.partition(":")
    if kind != "window" and config.window is not None:
        raise ValueError(f"window has no effect under release {config.release}, only under window")
    if config.window is not None and config.goes_by_times:
        raise ValueError(f"window has no effect under order {config.order}, which considers all waiting requests")
    if config.window is not None and config.window < size:
        raise ValueError(f"window: {config.window} requests are fewer than a batch of {size}")
    limit_s = math.inf if config.batch_wait_s is None else config.batch_wait_s
    if kind == "static" and int(static) > size:
        raise ValueError(f"release {config.release}: a batch has at most {size} requests (--batch-size)")
    releases: dict[str, Callable[[], Release]] = {
        "window": lambda: Window(size),
        "full": lambda: Full(size),
        "static": lambda: Full(int(static)),
        "timeout": lambda: Timeout(size, TIMEOUT_S if config.batch_wait_s is None else config.batch_wait_s),
        "greedy": lambda: Greedy(size),
        "rate-headroom": lambda: Rate(
            size, arrivals, config.rate_headroom, RATE_WAIT_S if config.batch_wait_s is None else config.batch_wait_s
        ),
        "deadline": lambda: Deadline(size),
        "table": lambda: Table(size, limit_s),
    }
    return releases[kind]()
