"""Notes of a process: what its engine warns of, such as a failed capture, must stand beside the results."""

from __future__ import annotations

import json
import logging
from pathlib import Path


class Noted(logging.Handler):
    """Keeps the warnings of the embedded engine, each once. path : JSON file with the notes so far; None: no file"""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(logging.WARNING)
        self.notes: list[str] = []
        self._path = path
        logging.getLogger("llmserve.embedded").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.add(record.getMessage())

    def add(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
        if self._path is not None:
            self._path.write_text(json.dumps(self.notes), encoding="utf-8")
