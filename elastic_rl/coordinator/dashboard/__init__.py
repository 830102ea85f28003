"""The dashboard on every replica: ``/`` lists the jobs, and each has its page at ``/jobs/NAME``, live over its stream
of changes. Its files need no build and load nothing from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

from fastapi import FastAPI, Request, Response

from elastic_rl.coordinator.problems import not_found

_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8",
          ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_HEADERS = {
    # No inline script or style, no other host, no frame, and no parsing of text as markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
                               "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
                               "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class _Asset:
    content: bytes
    media_type: str
    etag: str


def _assets() -> dict[str, _Asset]:
    """The files of the pages by name, read once: a requested name is looked up here and never in a folder."""
    found = {}
    for entry in resources.files(__name__).iterdir():
        suffix = entry.name[entry.name.rfind("."):]
        if suffix in _TYPES and entry.is_file():
            content = entry.read_bytes()
            tag = hashlib.blake2s(content, digest_size=8).hexdigest()
            found[entry.name] = _Asset(content, _TYPES[suffix], f'"{tag}"')
    return found


def install(app: FastAPI) -> None:
    """Adds the pages and their files. They hold no data of any job and so need no token; what they read does."""
    assets = _assets()

    def answer(request: Request, name: str) -> Response:
        asset = assets.get(name)
        if asset is None:
            raise not_found("file of the dashboard", name)
        headers = {**_HEADERS, "ETag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.content, media_type=asset.media_type, headers=headers)

    @app.get("/", include_in_schema=False)
    async def jobs(request: Request) -> Response:
        return answer(request, "index.html")

    @app.get("/jobs/{name}", include_in_schema=False)
    async def job(request: Request, name: str) -> Response:  # also for one that is not there: the page needs no token
        return answer(request, "job.html")

    @app.get("/dashboard/{name}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return answer(request, name)
