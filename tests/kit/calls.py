"""Calls for tests, by the fields that a test is about."""

from __future__ import annotations

from typing import Any

from llmserve.request import Bounds, Call, Terms, Wire
from predictor.prompt import Prompt

GROUPS = {"wire": Wire, "bounds": Bounds, "terms": Terms}


def a_call(path: str, body: bytes, prompt: Prompt, stream: bool = False, **fields: Any) -> Call:
    """A call. fields : of the call, and of its groups by their own names"""
    grouped: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    grouped["wire"] = {"path": path, "body": body, "stream": stream}
    grouped["terms"]["key"] = prompt.sender
    own = {}
    for name, value in fields.items():
        group = next((group for group, kind in GROUPS.items() if name in kind.__struct_fields__), None)
        (own if group is None else grouped[group])[name] = value
    made = {group: kind(**grouped[group]) for group, kind in GROUPS.items()}
    return Call(prompt=prompt, **made, **own)
