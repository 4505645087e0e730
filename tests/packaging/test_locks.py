"""The lock files: every package that llmserve needs, in one version, with the hashes of its files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ["server", "image", "embedded", "test", "torch", "torch-cpu", "vllm", "docs", "chart"]


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package of a lock, and of the locks that it includes."""
    packages: dict[str, tuple[str, list[str]]] = {}
    text = (ROOT / "requirements" / f"{name}.lock").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.startswith("-r "):
            packages |= locked(line.removeprefix("-r ").removesuffix(".lock"))
        elif not line.startswith("#"):
            pinned, *hashes = line.split()
            package, version = pinned.split("==")
            assert package not in packages, f"{package} is there twice"
            packages[package] = version, hashes
    return packages


def needed(extra: str) -> list[Requirement]:
    """What pyproject.toml names for an extra, "" for none, on this machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    waiting, found = [*project["dependencies"], *extras.get(extra, [])], []
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name == "llmserve":
            waiting += [text for name in requirement.extras for text in extras[name]]
        elif requirement.marker is None or requirement.marker.evaluate():
            found.append(requirement)
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_one_version_and_hashes(name: str) -> None:
    for package, (version, hashes) in locked(name).items():
        assert re.fullmatch(r"[\d.]+(\.?(post|rc|a|b)\d+)?(\+cpu)?", version), package
        assert hashes, package
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", text) for text in hashes), package


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("server", ""),
        ("image", "jobs"),
        ("image", "predictor"),
        ("image", "auth"),
        ("image", "timed"),
        ("embedded", "embedded"),
        ("test", "test"),
    ],
)
def test_a_lock_has_what_its_extra_needs(name: str, extra: str) -> None:
    packages = locked(name) | locked("torch")
    for requirement in needed(extra):
        version, _ = packages[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is locked at {version}: renew the locks"


def test_a_lock_has_what_builds_llmserve() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    for requirement in map(Requirement, build):
        assert requirement.specifier.contains(locked("server")[requirement.name][0])


def test_torch_is_locked_apart_as_two_builds_of_one_version() -> None:
    """In one lock pip would take PyPI's file, whose hash it knows before the download: on Linux the build for CUDA."""
    (cpu, cpu_hashes), (pypi, hashes) = (locked(name)["torch"] for name in ("torch-cpu", "torch"))
    assert cpu == f"{pypi}+cpu"
    assert not set(cpu_hashes) & set(hashes)
    for name in ("test", "vllm"):
        assert not [package for package in locked(name) if package == "torch" or package.startswith("nvidia-cu")]
