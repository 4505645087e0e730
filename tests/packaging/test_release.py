"""`scripts/release`, rehearsed in a clone: version, changelog, tag, files."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WHO = {f"GIT_{who}_{what}": "release" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def release(clone: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/release", version]
    environment = {**os.environ, **WHO, "PYTHONPATH": ""}
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with a release in it."""
    place = tmp_path_factory.mktemp("release") / "clone"
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout: the files of an sdist have no history")
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", str(place)], check=True, timeout=120)
    done = release(place, "7.8.9")
    assert done.returncode == 0, done.stderr
    return place


def test_the_version_is_the_same_everywhere_and_the_notes_have_it(clone: Path) -> None:
    for file in ("pyproject.toml", "llmserve/__init__.py", "CITATION.cff"):
        assert "7.8.9" in (clone / file).read_text(), file
    changelog = (clone / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[Unreleased\]\n\n## \[7\.8\.9\] - \d{4}-\d\d-\d\d\n\n### Added$", changelog, re.MULTILINE)
    tagged = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=clone, capture_output=True, text=True)
    assert tagged.stdout == "v7.8.9\n"


def test_twine_finds_nothing_to_warn_of(clone: Path) -> None:
    """The script has asked it already; here a package without a description shows that it looks."""
    dist = clone / "dist"
    assert twine("check", "--strict", str(dist / "llmserve-7.8.9-py3-none-any.whl")).returncode == 0
    assert twine("check", "--strict", str(dist / "llmserve-7.8.9.tar.gz")).returncode == 0
    bare = clone.parent / "bare-1.0.tar.gz"
    with tarfile.open(bare, "w:gz") as sdist:
        text = b"Metadata-Version: 2.1\nName: bare\nVersion: 1.0\n"
        entry = tarfile.TarInfo("bare-1.0/PKG-INFO")
        entry.size = len(text)
        sdist.addfile(entry, io.BytesIO(text))
    assert twine("check", "--strict", str(bare)).returncode == 1


def twine(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "twine", *words], capture_output=True, text=True, timeout=120)


def test_the_files_are_complete_and_their_sums_are_right(clone: Path) -> None:
    dist = clone / "dist"
    names = {"llmserve-7.8.9-py3-none-any.whl", "llmserve-7.8.9.tar.gz", "sbom.cdx.json"}
    sums = dict(reversed(line.split()) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == names == {path.name for path in dist.iterdir()} - {"SHA256SUMS"}
    assert all(hashlib.sha256((dist / name).read_bytes()).hexdigest() == sums[name] for name in names)
    with tarfile.open(dist / "llmserve-7.8.9.tar.gz") as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"tests/conftest.py", "docs/index.md", "requirements/test.lock", "scripts/test", "CITATION.cff"} < inside


def test_the_description_has_no_link_that_only_the_repository_can_follow(clone: Path) -> None:
    with zipfile.ZipFile(clone / "dist" / "llmserve-7.8.9-py3-none-any.whl") as wheel:
        (place,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        metadata = message_from_bytes(wheel.read(place))
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"Homepage", "Documentation", "Issues", "Changelog"} == {
        url.partition(",")[0] for url in metadata.get_all("Project-URL", [])
    }
    for python in ("3.11", "3.12", "3.13", "3.14"):
        assert f"Programming Language :: Python :: {python}" in metadata.get_all("Classifier", [])
    links = re.findall(r"\]\(([^()\s]+)\)", str(metadata.get_payload()))
    assert links
    assert [link for link in links if not link.startswith(("https://", "http://", "#"))] == []


def test_the_bill_of_materials_names_what_the_base_install_brings(clone: Path) -> None:
    bill = json.loads((clone / "dist" / "sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", "7.8.9")
    parts = {part["name"]: part for part in bill["components"]}
    assert {"numpy", "httptools", "starlette"} < parts.keys()
    assert "onnxruntime" not in parts
    assert all(part["hashes"] for part in parts.values())


def test_what_cannot_be_released_is_refused_before_anything_is_written(clone: Path) -> None:
    for version, why in (("7.8", "is no version"), ("7.8.9", "there is a tag v7.8.9"), ("7.9.0", "has files")):
        done = release(clone, version)
        assert done.returncode == 1
        assert done.stderr.startswith("release: ")
        assert why in done.stderr
    (clone / "README.md").write_text("changed")
    assert "commit them first" in release(clone, "7.9.0").stderr
