"""ETags of what operators change: the revision of its spec in etcd, so that nobody overwrites a change unseen."""

from __future__ import annotations

from elastic_rl.coordinator.problems import Kind, Problem

_MAX_DIGITS = 18
"""Most digits of a revision of etcd, which has 63 bits."""


def etag(revision: int) -> str:
    """The ETag of a spec that was last changed at a revision of etcd; 0 for one that was never written."""
    return f'"{revision}"'


def revision_of(tag: str) -> int:
    """The revision that an ETag of ours stands for."""
    return int(tag.strip('"'))


def parse_if_match(header: str | None, what: str) -> int | None:
    """Revision named by an If-Match header, or None for ``*``. ``what``: the kind of thing that is to be changed.

    Raises a 428 problem without the header, and 412 for what is no ETag of ours.
    """
    if header is None or not header.strip():
        raise Problem(428, Kind.PRECONDITION_REQUIRED, "If-Match is required",
                      f"GET the {what}, and send its ETag in If-Match with the change")
    tag = header.strip()
    if tag == "*":
        return None
    tag = tag.removeprefix("W/").strip('"')
    if not (tag.isascii() and tag.isdecimal() and len(tag) <= _MAX_DIGITS):
        raise Problem(412, Kind.PRECONDITION_FAILED, f"The {what} has changed",
                      f"{header!r} is not the {what}'s ETag")
    return int(tag)


def check_revision(revision: int, if_revision: int | None, what: str) -> None:
    """Raises a 412 problem unless the spec was last changed at ``if_revision``; None accepts any."""
    if if_revision is not None and revision != if_revision:
        raise Problem(412, Kind.PRECONDITION_FAILED, f"The {what} has changed",
                      f"its ETag is {etag(revision)} now, not {etag(if_revision)}", headers={"ETag": etag(revision)})
