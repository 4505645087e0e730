"""README and guides, walked through: their commands run one after the other, as somebody new types them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "docs/install.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs/guide").glob("*.md"))]
ALONE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "true"]

pytestmark = pytest.mark.slow


def newcomer(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "newcomer"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=540)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_in_their_order(page: str) -> None:
    if subprocess.run(ALONE, capture_output=True).returncode:
        pytest.skip("this machine gives no namespace of its own, where the ports of the pages are free")
    walked = newcomer("walk", page)
    assert walked.returncode == 0, walked.stdout + walked.stderr


def test_a_command_that_fails_is_told(tmp_path: Path) -> None:
    if subprocess.run(ALONE, capture_output=True).returncode:
        pytest.skip("this machine gives no namespace of its own, where the ports of the pages are free")
    page = tmp_path / "page.md"
    page.write_text(
        "```\nllmserve simulate --requests 100 --load 0.1\nllmserve keys revoke nobody --api-key-file keys\n```\n"
    )
    walked = newcomer("walk", str(page))
    assert walked.returncode == 1
    assert "keys has no key named 'nobody'" in walked.stdout
    assert walked.stdout.endswith("1 commands ran, 0 were left out, 1 failed\n")
