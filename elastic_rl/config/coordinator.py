"""Coordinator replicas and the admin API."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import Positive, Seconds, Section


class CoordinatorConfig(Section):
    replicas: Positive = 2
    """Coordinator processes that ``up`` starts; one leads."""
    host: str = "127.0.0.1"
    """Address the admin API binds."""
    ports: list[int] = []
    """One port a replica; empty: free ports are chosen."""
    lease_ttl_s: Annotated[int, Field(ge=2)] = 3
    """Time to live of leader and member leases; a dead process is noticed within it."""
    hang_factor: Annotated[float, Field(gt=1)] = 10.0
    """A member counts as hung when it was silent for so many times as long as is usual in what it does ..."""
    hang_floor_s: Seconds = 30.0
    """... but not sooner than this ..."""
    hang_ceiling_s: Seconds = 600.0
    """... and not later; the only limit of a phase that was not seen three times yet. Longer than any bounded wait."""
    reconcile_interval_s: Seconds = 0.5
    """Longest pause between two looks at desired against actual."""
    events_keep: Positive = 2000
    """Events kept in etcd; older ones are trimmed by the leader."""
    steps_keep: Annotated[int, Field(ge=100)] = 2000
    """Points of the run's curves kept in etcd; the leader thins out old ones, evenly."""
    max_engines: Positive = 64
    """Largest number of engines that the API accepts for a pool."""
    allowed_hosts: list[str] = []
    """Host names under which browsers and clients may reach the admin API, such as ``rl.example.com`` or
    ``*.example.com``, besides localhost, IP addresses, ``host``, ``advertise_host`` and this machine's host name. A
    request for any other name is refused, so that no page can reach the API through a name of its own (DNS rebinding).
    """
    link_ttl_s: Annotated[int, Field(ge=2)] = 120
    """Seconds within which a link of ``elastic-rl dashboard`` has to be opened; it works once."""
    session_ttl_s: Annotated[int, Field(ge=2)] = 12 * 3600
    """Seconds after which a browser session of the dashboard ends. A new link opens another one."""
    advertise_host: str = ""
    """Name or address under which others reach the admin API where it is not the one that it binds; with TLS, one that
    its certificate is for."""
    tls_cert: str = ""
    """PEM certificate (chain) of the admin API; with ``tls_key`` it speaks TLS only."""
    tls_key: str = ""
    tls_ca: str = ""
    """PEM file of the authority by which replicas and our own clients check it; empty: the system's authorities."""
    max_requests: Positive = 128
    """Requests that a replica works on at once; it refuses further ones until there is room."""
    max_streams: Positive = 64
    """Event streams that a replica keeps open."""
    max_body_bytes: Positive = 65536
    """Largest body of a request."""
    request_timeout_s: Seconds = 10.0
    """A request whose headers or body take longer to arrive is given up."""

    @property
    def scheme(self) -> str:
        """Of the admin API's URLs."""
        return "https" if self.tls_cert else "http"
