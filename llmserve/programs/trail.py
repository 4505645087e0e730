"""What one request says of the program that it belongs to, without ids: where its prompt may go on from.

A conversation is sent whole with each request. So the prompt of the request before is its beginning, up to an answer
of the assistant, or to what a person has added: the marks are hashes of all such beginnings, and of the whole prompt,
which the next request will have. They are Python's own hashes, which have a key of the process, and never leave it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from llmserve.programs.sources import Sent

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
    """

    marks: tuple[int, ...] = ()
    step: int = 0
    about: tuple[str, bytes] = ("", b"")
    tool_call: str = ""
    sent: Sent | None = None


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
