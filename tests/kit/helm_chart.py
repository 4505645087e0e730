"""Renders the chart in the environment of scripts/environment-chart, which has Helm's code and the API's schemas.

    python tests/kit/helm_chart.py < VALUES.json      prints {"manifests": [...], "wrong": [...]} or {"refused": "..."}

wrong : what a version of Kubernetes does not accept, in words. Resources that are not Kubernetes' own are not compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "llmserve"
VERSIONS = ("1.25", "1.31", "1.37")  # of Kubernetes: the oldest and the newest that have schemas here, and one between


def main() -> None:
    import yaml
    from helm_python import Chart
    from helm_python.errors import HelmError

    values = json.load(sys.stdin)
    try:
        texts = Chart.load(CHART).render(values, name="llmserve", namespace="serving")
    except HelmError as error:
        print(json.dumps({"refused": str(error)}))
        return
    manifests = [part for text in texts.values() for part in yaml.safe_load_all(text) if part is not None]
    wrong = [fault for manifest in manifests for version in VERSIONS for fault in faults(manifest, version)]
    print(json.dumps({"manifests": manifests, "wrong": wrong}))


def faults(manifest: dict[str, Any], version: str) -> list[str]:
    from kubernetes_validate import SchemaNotFoundError, ValidationError, validate

    try:
        validate(manifest, version, strict=True)
    except ValidationError as error:
        return [f"{manifest['kind']} in {version}: {'.'.join(map(str, error.path))}: {error.message}"]
    except SchemaNotFoundError:
        return [] if manifest["apiVersion"].startswith("keda.sh/") else [f"{version} has no {manifest['kind']}"]
    return []


if __name__ == "__main__":
    main()
