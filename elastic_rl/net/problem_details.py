"""RFC 9457: what an answer about an error says to a program."""

from __future__ import annotations

from typing import Any

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:elastic-rl:problem:"
MALFORMED, HEADERS_TOO_LARGE, OTHER = "malformed", "headers-too-large", "http"
"""Kinds of what is no request at all, which the server itself answers. ``coordinator.problems`` has all others."""


def problem_details(kind: str, status: int, title: str, detail: str, **members: Any) -> dict[str, Any]:
    """The body of a problem of a kind: ``type`` is stable, texts may change."""
    return {"type": TYPE_PREFIX + kind, "title": title, "status": status, "detail": detail, **members}
