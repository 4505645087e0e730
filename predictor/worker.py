"""The child of predictor/process.py: `python -m predictor.worker FOLDER THREADS`.

One JSON value per line. The first line is {"training_lengths": [...], "forecasts": [...], "characters_max": n} or
{"error": "..."}. Then each line [[text, model, system, history characters, [stop, ...]], ...] on the standard input
gets one line {"predictions": [[[length, ...], features], ...]}, the features in base64, with an error text in the place
of a prompt that failed. The process ends with its input.
"""

import ctypes
import json
import os
import signal
import sys
from base64 import b64encode
from typing import IO, Any

from predictor.prompt import Prompt

PR_SET_PDEATHSIG = 1


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal, to the whole process group: the parent ends this
        signal.signal(number, signal.SIG_IGN)
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
        {
            "training_lengths": predictor.training_lengths,
            "forecasts": predictor.forecasts,
            "characters_max": predictor.characters_max,
        },
    )
    for line in sys.stdin.buffer:
        prompts = [Prompt(*fields) for fields in json.loads(line)]
        _reply(replies, {"predictions": _predict(predictor, prompts)})


def _load(folder: str, threads: int) -> Any:
    from predictor.predict import LengthPredictor  # takes most of a second: imported after the signals are set

    return LengthPredictor.load(folder, threads)


def _predict(predictor: Any, prompts: list[Prompt]) -> list[tuple[list[float], str] | str]:
    """Predict all prompts at once; if that fails, one by one, so that only the bad prompts fail."""
    try:
        return [
            ([round(length, 1) for length in lengths], b64encode(features).decode())
            for lengths, features in predictor.predictions(prompts)
        ]
    except Exception as error:
        if len(prompts) == 1:
            return [f"{type(error).__name__}: {error}"]
        return [answer for prompt in prompts for answer in _predict(predictor, [prompt])]


def _reply(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _take_stdout() -> IO[str]:
    """Return the pipe to the parent, and send what libraries print to the standard error instead."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return pipe


def _die_with_parent() -> None:
    """On Linux, end at once when the parent is killed. On other systems the end of the input ends this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
