"""Answers a question of a live server at the lowest priority: `python -m llmserve.simulation.twin.process`.

Standard input: a question without its steps, then lists of steps, each a line of JSON. Standard output: the answer.
"""

from __future__ import annotations

import os
import sys


def main() -> int:
    os.nice(19)  # before the imports, which take a while
    import msgspec
    from threadpoolctl import threadpool_limits

    from llmserve.live.journal import Step
    from llmserve.simulation.twin.tuner import Question, answer

    threadpool_limits(1, user_api="blas")
    question = msgspec.json.decode(sys.stdin.buffer.readline(), type=Question)
    lists = msgspec.json.Decoder(tuple[Step, ...])
    steps = tuple([step for line in sys.stdin.buffer for step in lists.decode(line)])
    sys.stdout.buffer.write(msgspec.json.encode(answer(msgspec.structs.replace(question, steps=steps))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
