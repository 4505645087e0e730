"""Releases and orders by name; MODULE:FUNCTION names a custom order."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llmserve.errors import ConfigError
from llmserve.scheduling.choice.orders import (
    PREEMPTION_FACTOR,
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

TIMEOUT_S = 0.05
PATIENCE = 12.0
RATE_WAIT_S = 1.0  # BatchMonitor's window


class OrderSettings(NamedTuple):
    """What orders are made of besides their names; see SchedulingConfig."""

    patience: float | None = None
    preemption: str = "on"
    preemption_factor: float = PREEMPTION_FACTOR


class ReleaseSettings(NamedTuple):
    """What releases are made of besides their names; see SchedulingConfig."""

    batch_size: int
    batch_wait_s: float | None
    rate_headroom: float


def _shortest(config: OrderSettings) -> Order:
    patience = PATIENCE if config.patience is None else config.patience
    return FixedOrder(shortest(patience), turn(patience))


ORDERS: dict[str, Callable[[OrderSettings], Order]] = {
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


def named_order(name: str, settings: OrderSettings) -> Order:
    """Return an order by its name: one of ORDERS, or a custom order MODULE:FUNCTION. Raises ConfigError for others."""
    make = ORDERS.get(name)
    return make(settings) if make is not None else custom_order(name)


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


def named_release(name: str, settings: ReleaseSettings, arrivals: Arrivals) -> Release:
    """Create a release by its name, for one model with its arrivals. Raises ValueError on too large a static batch."""
    kind, _, static = name.partition(":")
    size, wait_s = settings.batch_size, settings.batch_wait_s
    if kind == "static" and int(static) > size:
        raise ValueError(f"release {name}: a batch has at most {size} requests (--batch-size)")
    releases: dict[str, Callable[[], Release]] = {
        "window": lambda: Window(size),
        "full": lambda: Full(size),
        "static": lambda: Full(int(static)),
        "timeout": lambda: Timeout(size, TIMEOUT_S if wait_s is None else wait_s),
        "greedy": lambda: Greedy(size),
        "rate-headroom": lambda: Rate(
            size, arrivals, settings.rate_headroom, RATE_WAIT_S if wait_s is None else wait_s
        ),
        "deadline": lambda: Deadline(size),
        "table": lambda: Table(size, math.inf if wait_s is None else wait_s),
    }
    return releases[kind]()
