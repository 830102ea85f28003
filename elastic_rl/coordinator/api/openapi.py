"""The OpenAPI document of the admin API."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from elastic_rl.coordinator.api.models import ProblemBody
from elastic_rl.coordinator.api.route_docs import PROBLEMS
from elastic_rl.net.problem_details import TYPE_PREFIX

_SCHEMA = "#/components/schemas/{model}"
_SECURITY = {
    "token": {"type": "http", "scheme": "bearer",
              "description": "A viewer's token reads; an operator's token changes things as well."},
    "session": {"type": "apiKey", "in": "cookie", "name": "elastic-rl-<job digest>",
                "description": "Of the dashboard: `POST /v1/session` sets it."},
}


def install(app: FastAPI) -> None:
    """Makes the app serve this document; it is built once."""
    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes,
                       separate_input_output_schemas=False)
    components = made.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    problem = ProblemBody.model_json_schema(ref_template=_SCHEMA)
    schemas.update(problem.pop("$defs", {}))
    problem["properties"]["type"] |= {"enum": [TYPE_PREFIX + kind for kind in PROBLEMS]}
    schemas["Problem"] = problem
    components["securitySchemes"] = _SECURITY
    for path, methods in made["paths"].items():
        if path.startswith("/v1/") or path == "/metrics":
            for operation in methods.values():
                operation["security"] = [{name: []} for name in _SECURITY]
    return made


def text(app: FastAPI) -> str:
    """The document as it is checked in."""
    return json.dumps(app.openapi(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
