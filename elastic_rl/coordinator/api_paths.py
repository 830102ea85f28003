"""Paths of the admin API that more than its routes name: a ``Location`` of an answer, and a client's requests."""

from __future__ import annotations

from urllib.parse import quote

HOSTS = "/v1/hosts"
"""Route of the cluster's hosts."""
OF_JOB = "/v1/jobs/{job}"
"""Route of a job. The routes of all that belongs to the job are below it."""


def job_path(job: str, *below: str) -> str:
    """Path of a job or, by its names from there on, of something below it. Names are quoted."""
    return "/v1/jobs/" + "/".join(quote(name, safe="") for name in (job, *below))


def host_path(host: str) -> str:
    """Path of a host, whose name is quoted."""
    return f"{HOSTS}/{quote(host, safe='')}"
