"""What commands say of the installation: the line that adds an extra, by where the installation came from."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from missing_modules import without

from llmserve.errors import ConfigError
from llmserve.runtime import installation
from llmserve.runtime.installation import check_packages, pip_install

PIP = f"{sys.executable} -m pip install"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An installation that is no checkout, beside a file that it may have come from."""
    monkeypatch.setattr(installation, "ROOT", tmp_path / "site-packages")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = importlib.util.find_spec
    pip = ModuleSpec("pip", None)  # an environment made by uv has none
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pip if name == "pip" else found(name))
    wheel = tmp_path / "llmserve.whl"
    wheel.touch()
    return wheel


def noted(monkeypatch: pytest.MonkeyPatch, source: dict[str, Any] | None) -> None:
    """An installer that has noted this origin."""
    text = None if source is None else json.dumps(source)

    class Noted(importlib.metadata.PathDistribution):
        def read_text(self, filename: Any) -> str | None:
            return text if filename == "direct_url.json" else None

    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Noted(Path()))


def test_from_an_index_the_extra_comes_from_there(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted(monkeypatch, None)
    assert pip_install("jobs") == f"{PIP} 'llmserve[jobs]'"


def test_from_a_file_the_extra_comes_from_the_file(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted(monkeypatch, {"url": elsewhere.as_uri(), "archive_info": {}})
    assert pip_install("jobs") == f"{PIP} '{elsewhere}[jobs]'"
    elsewhere.unlink()  # as in an image, whose build had the file
    assert pip_install("jobs") == f"{PIP} 'llmserve[jobs]'"


def test_from_an_address_the_extra_comes_from_the_address(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://example.org/llmserve"
    noted(monkeypatch, {"url": url, "vcs_info": {"vcs": "git", "requested_revision": "v1", "commit_id": "a1b2"}})
    assert pip_install("jobs") == f"{PIP} 'llmserve[jobs] @ git+{url}@v1'"
    noted(monkeypatch, {"url": f"{url}.whl", "archive_info": {}})
    assert pip_install("jobs") == f"{PIP} 'llmserve[jobs] @ {url}.whl'"


def test_in_a_checkout_the_extra_comes_from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: str(Path(sys.executable).parent / "pip"))
    assert pip_install("jobs") == f"pip install --editable '{installation.ROOT}[jobs]'"


def test_an_environment_without_pip_gets_the_extra_by_uv(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted(monkeypatch, None)
    without(monkeypatch, "pip")
    assert pip_install("jobs") == f"uv pip install --python {sys.executable} 'llmserve[jobs]'"


def test_the_packages_of_this_checkout_are_its_own() -> None:
    check_packages()


def test_packages_that_are_not_beside_llmserve_are_another_projects(elsewhere: Path) -> None:
    with pytest.raises(ConfigError, match=r"the package bins is another project's here \(.*bins\): start llmserve in"):
        check_packages()
