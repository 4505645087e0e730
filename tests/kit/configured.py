"""The configuration of a server, as `llmserve serve` reads it."""

from collections.abc import Mapping
from typing import Any

from llmserve.settings.load import load
from llmserve.settings.tree import Config


def load_config(flags: Mapping[str, Any], environment: Mapping[str, str], file: str | None) -> Config:
    config, _ = load(Config, flags, environment, file)
    return config
