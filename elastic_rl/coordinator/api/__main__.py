"""``python -m elastic_rl.coordinator.api > docs/openapi.json``: prints the OpenAPI document of the admin API."""

from __future__ import annotations

import sys

from elastic_rl.coordinator.api import openapi
from elastic_rl.coordinator.api.app import APP

if __name__ == "__main__":
    sys.stdout.write(openapi.text(APP))
