"""What one request says of the program that it belongs to, without ids: where its prompt may go on from.

A conversation is sent whole with each request. So the prompt of the request before is its beginning, up to an answer
of the assistant, or to what a person has added: the marks are hashes of all such beginnings, and of the whole prompt,
which the next request will have. They are Python's own hashes, which have a key of the process, and never leave it.

A prompt without turns, as /v1/completions takes it, does not show where an earlier one may have ended. Its marks are
looked for at the lengths at which earlier prompts have ended, behind each block that they have in common with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from llmserve.programs.sources import Sent
from llmserve.request import BLOCK_BYTES

ENDS_MAX = 64  # lengths that are remembered behind one block
KIND_CHARACTERS = 1024  # of a system prompt: what follows often names a user, a folder or a day


class Trail(msgspec.Struct, gc=False):
    """What is known of a request's place in its program.

    marks    hashes of the prompt up to each place where an earlier one may have ended, the last of the whole prompt; ()
             for no conversation
    step     1: a person's message is the last; n: the assistant has answered n - 1 times since; 0: there is no
             person's message, as where a prompt is only what follows an earlier response
    about    the first KIND_CHARACTERS of the system prompt, and the tools as JSON
    tool_call  id of the last tool call whose result is in the prompt; "" for none
    sent     ids that the client has sent
    blocks, text  of a prompt without turns: the hashes of its whole blocks, and the prompt; else empty
    """

    marks: tuple[int, ...] = ()
    step: int = 0
    about: tuple[str, bytes] = ("", b"")
    tool_call: str = ""
    sent: Sent | None = None
    blocks: tuple[int, ...] = ()
    text: str | bytes | memoryview = ""


def marks_of(turns: Iterable[tuple[str, str]], start: int = 0) -> tuple[tuple[int, ...], int]:
    """The marks and the step of a prompt. turns : (role, text).  start : what else distinguishes the prompt

    A person may speak while tools run: behind the result of a tool, a user's message begins no turn. Answers that the
    API splits into several items are one.
    """
    marks, mark, step, before = [], start, 0, ""
    for turn in turns:
        role = turn[0]
        if role == "assistant":
            if before != "assistant":
                marks.append(mark)
                step += step > 0
        elif role == "user":
            if before == "user" or before == "tool":
                marks.append(mark)
            if before != "tool":
                step = 1
        mark = hash((mark, turn))
        before = role
    marks.append(mark)
    return tuple(marks), step


class Ends:
    """Where prompts without turns have ended: how many bytes behind a whole block, of the last `most` such blocks."""

    __slots__ = ("_lengths", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._lengths: OrderedDict[int, list[int]] = OrderedDict()

    def marks(self, trail: Trail) -> tuple[int, ...]:
        """As Trail.marks, of a prompt without turns that has a whole block. Its own end is noted."""
        text = trail.text
        whole = text.encode(errors="replace") if isinstance(text, str) else bytes(text) + b","  # 1,2: not 1,23's
        marks = []
        for number, block in enumerate(trail.blocks, 1):
            start = number * BLOCK_BYTES
            for length in sorted(self._lengths.get(block, ())):
                if start + length < len(whole):
                    marks.append(hash((block, whole[start : start + length])))
        rest = whole[len(trail.blocks) * BLOCK_BYTES :]
        self._note(trail.blocks[-1], len(rest))
        return (*marks, hash((trail.blocks[-1], rest)))

    def _note(self, block: int, length: int) -> None:
        lengths = self._lengths.get(block)
        if lengths is None:
            self._lengths[block] = [length]
            if len(self._lengths) > self._most:
                self._lengths.popitem(last=False)
        elif length not in lengths:
            lengths.append(length)
            del lengths[:-ENDS_MAX]
