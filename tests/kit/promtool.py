"""Prometheus' own checker. scripts/test sets PROMTOOL, so that no test that needs it is skipped there."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

PATH = os.environ.get("PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PATH is None, reason="promtool is not installed; scripts/test unpacks it")


def promtool(*words: str, text: str = "") -> str:
    """What promtool prints. Raises AssertionError with it when promtool finds a fault."""
    assert PATH is not None, "the test is marked with needs_promtool"
    done = subprocess.run([PATH, *words], input=text, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said
