"""The services of a job's compute plane on this host: its Ray, the routers of its pools.

They outlive the driver that has started them, and the next driver of the epoch adopts them. The host agent restarts
none of them. ``leftovers.sweep`` ends them with the run.
"""

from __future__ import annotations

from elastic_rl.host.paths import JobPaths
from elastic_rl.host.service_files import ServiceFiles

RAY = "ray"
"""Name of the service that is Ray."""


def router_service(pool: str) -> str:
    """Name of the service that is the router of a pool."""
    return f"router-{pool}"


def compute_services(job: JobPaths) -> ServiceFiles:
    """The services of the compute plane; the generation of each is the epoch that it was started in."""
    return ServiceFiles(job.compute_services)


def ray_epoch(job: JobPaths) -> int:
    """The epoch whose Ray runs on this host, or is starting; 0 where none does."""
    record = compute_services(job).get(RAY)
    return record.generation if record is not None and record.running else 0
