"""A timed engine whose answers are as long as their prompts' templates say.

python scripts/lab cold.engine --slots 8 --step-s 0.006 --port 8002
"""

from __future__ import annotations

from llmserve.engines.timed import server
from llmserve.engines.timed.body import FakeBody
from questions.cold import templates


class TemplateEngine(server.FakeEngine):
    def tokens_of(self, body: FakeBody) -> int:
        return templates.tokens_of(body.prompts.decode())


def main() -> None:
    server.main(TemplateEngine)
