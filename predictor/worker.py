"""The predictor process's other end: `python -m predictor.worker FOLDER THREADS`. See predictor/process.py.

One JSON value per line. First, once: {"training_lengths": [...], "characters_max": n} or {"error": "..."}. Then, for
each line ["prompt", ...] on the standard input, one {"lengths": [...]} or {"error": "..."}. Ends with its input.
"""

import ctypes
import json
import os
import signal
import sys
from typing import IO, Any

PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; our parent decides when we end
    _die_with_parent()
    replies = _take_stdout()
    folder, threads = sys.argv[1], int(sys.argv[2])
    try:
        predictor = _load(folder, threads)
    except Exception as error:
        _reply(replies, {"error": str(error)})
        return
    _reply(
        replies,
        {"training_lengths": predictor.training_lengths, "characters_max": predictor.characters_max},
    )
    for line in sys.stdin.buffer:
        try:
            _reply(replies, {"lengths": predictor.predict(json.loads(line))})
        except Exception as error:
            _reply(replies, {"error": f"{type(error).__name__}: {error}"})


def _load(folder: str, threads: int) -> Any:
    import torch  # seconds: hence only after the signals are set

    from predictor.predict import LengthPredictor

    torch.set_num_threads(threads)
    return LengthPredictor.load(folder)


def _reply(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _take_stdout() -> IO[str]:
    """The pipe to the parent, for us alone: what any library prints goes to the standard error instead."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return ours


def _die_with_parent() -> None:
    """At once when the parent is killed. Elsewhere than on Linux the end of our input does it, after the batch."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
