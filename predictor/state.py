"""What a learning part has learnt, as data that can be written and taken back.

A state is a dictionary of numbers, texts, lists, further states and numpy arrays. `state()` makes one. A large part has
`saving()` too, which makes the state in slices, so that an event loop can do other work in between. `restore(state)`
takes a state back. It raises ValueError for a state that it cannot use; the part must not be used afterwards.
"""

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

State = dict[str, Any]
Saving = Generator[None, None, State]
"""Makes a state in slices of well below a millisecond, with a `yield` after each; returns the state."""


def whole(saving: Saving) -> State:
    """Make a state at once."""
    while True:
        try:
            next(saving)
        except StopIteration as done:
            state: State = done.value
            return state


def part(state: State, name: str) -> Any:
    """An entry of a state. Raises ValueError when the state has none."""
    if not isinstance(state, dict) or name not in state:
        raise ValueError(f"the state has no {name!r}")
    return state[name]


def array(state: State, name: str, shape: tuple[int | None, ...], kind: str = "f") -> NDArray[Any]:
    """An array of a state. shape : None stands for any size.  kind : numpy's letter for the type.

    Raises ValueError when the state has no such array.
    """
    value = part(state, name)
    fits = isinstance(value, np.ndarray) and value.dtype.kind == kind and value.ndim == len(shape)
    if not fits or any(size not in (None, own) for size, own in zip(shape, value.shape, strict=True)):
        raise ValueError(f"{name!r} in the state is no array of shape {shape} and kind {kind!r}")
    found: NDArray[Any] = value
    return found
