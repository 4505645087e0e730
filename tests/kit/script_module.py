"""A script of scripts/ or scripts/lab/ as a module, for tests of its parts."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FOLDERS = (SCRIPTS, SCRIPTS / "lab")  # on pytest's path, as on each running script's path


def load_script(name: str) -> ModuleType:
    (path,) = [folder / f"{name}.py" for folder in FOLDERS if (folder / f"{name}.py").is_file()]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module
