"""Where this installation of llmserve came from, and whether its top-level packages are its own."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import shlex
import shutil
import sys
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from llmserve.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SHARED_NAMES = ("bins", "predictor")  # top-level packages whose names other projects use, too


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to this installation, in this environment and from the same source."""
    return f"{_installer()} {_requirement(extra)}"


def _installer() -> str:
    python = Path(sys.executable)
    if shutil.which("pip") == str(python.parent / "pip"):
        return "pip install"
    if importlib.util.find_spec("pip") is not None:
        return f"{shlex.quote(str(python))} -m pip install"
    return f"uv pip install --python {shlex.quote(str(python))}"


def _requirement(extra: str) -> str:
    """What pip is told, in a shell: a checkout, a file or an address (PEP 610), else the name for an index."""
    if _is_checkout():
        return f"--editable {shlex.quote(f'{ROOT}[{extra}]')}"
    source = _source()
    url = str(source.get("url", ""))
    place = Path(url2pathname(urlsplit(url).path))
    if url.startswith("file:") and place.exists():
        return shlex.quote(f"{place}[{extra}]")
    if version := source.get("vcs_info"):
        url = f"{version['vcs']}+{url}@{version.get('requested_revision') or version['commit_id']}"
    named = f"llmserve[{extra}]"
    return shlex.quote(f"{named} @ {url}" if url and not url.startswith("file:") else named)


def _is_checkout() -> bool:
    return (ROOT / "pyproject.toml").is_file()


def _source() -> dict[str, Any]:
    """The origin that the installer noted; {}: a package index."""
    try:
        noted = importlib.metadata.distribution("llmserve").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {}
    parsed: dict[str, Any] = json.loads(noted) if noted else {}
    return parsed


# ---- the packages --------------------------------------------------------------------------------------------------


def check_packages() -> None:
    """Raise ConfigError if another project's `bins` or `predictor` is in the place of llmserve's, in whole or in part.

    Neither is imported: with another project's files that would fail far from the cause.
    """
    for name in SHARED_NAMES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ConfigError(f"llmserve's package {name} is missing: install llmserve again")
        folders = [Path(folder).resolve() for folder in spec.submodule_search_locations or [str(spec.origin)]]
        if folders[0] != ROOT / name:
            alone = "start llmserve in another folder, or in an environment of its own"
            raise ConfigError(f"the package {name} is another project's here ({folders[0]}): {alone}")
    for file in _changed_files():
        name = file.partition("/")[0]
        if not (ROOT / file).exists():
            raise ConfigError(f"llmserve's {file} is missing: install llmserve again")
        others = set(importlib.metadata.packages_distributions().get(name, ())) - {"llmserve"}
        if others:  # else somebody has edited the file
            alone = "give llmserve an environment of its own, and install it there"
            raise ConfigError(f"{' and '.join(sorted(others))} has overwritten llmserve's {file}: {alone}")


def _changed_files() -> list[str]:
    """The modules of the shared names that are not what pip installed; [] in a checkout, of which pip knows no file."""
    if _is_checkout():
        return []
    try:
        files = importlib.metadata.distribution("llmserve").files or []
    except importlib.metadata.PackageNotFoundError:
        return []
    changed = []
    for file in files:
        if file.parts[0] in SHARED_NAMES and file.suffix == ".py" and file.hash is not None:
            path = ROOT / file
            digest = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.exists() else b""
            if urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                changed.append(str(file))
    return changed
