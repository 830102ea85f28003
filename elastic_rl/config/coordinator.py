"""Coordinator replicas and the admin API."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field, field_validator

from elastic_rl.config.section import PathText, Positive, Seconds, Section


class CoordinatorConfig(Section):
    replicas: Positive = 2
    """Number of coordinator processes that ``elastic-rl up`` starts. One leads; another takes over when it dies."""
    host: str = "127.0.0.1"
    """Address that the admin API listens on; 0.0.0.0 for all addresses of the host. 127.0.0.1 stands for the host's
    address where that has one (``up --address``)."""
    ports: list[Annotated[int, Field(ge=1, le=65535)]] = []
    """Port of each replica's admin API, one a replica. Empty: free ports are chosen."""
    insecure_network: bool = False
    """Whether jobs of a cluster with a name may use what talks without a password or TLS between hosts: TransferQueue
    (``train.queue``), whose sockets take pickles, so that whoever reaches them can run code as the user of the jobs.
    Only for hosts whose network and users are all trusted. ``up --insecure-network`` sets it."""
    parallel_jobs: Positive = 1
    """How many runs of jobs a cluster with a name has at once. Further ones are queued, and start in the order of their
    submission."""
    max_preempted_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the hosts of a cluster with a name that notices of preemption drain at the same time, at most, but one
    host always. Further notices wait, with an alert: a proxy or a metadata server that answers wrongly for all hosts
    must not empty the cluster. 1: no limit."""
    lease_ttl_s: Annotated[int, Field(ge=2)] = 3
    """Time to live, in seconds, of the leases of the leader and of DCS nodes, and the longest interval between two
    heartbeats of a member, whose lease lasts three times as long. An etcd that stalls for longer than this ends leases
    of healthy processes too."""
    suspicion_s: Seconds = 30.0
    """Seconds after the end of its lease within which a member is only suspected to be dead, as long as another process
    of its machine could see its end and has not. On a machine with more work than cores this is up to four times as
    long."""
    host_lost_s: Seconds = 3.0
    """Seconds after the end of its lease within which a member is only suspected to be dead when no process of its
    machine is heard any more, because the host has failed or is cut off."""
    hang_factor: Annotated[float, Field(gt=1)] = 10.0
    """A member that sends heartbeats counts as hung when its work made no progress for this many times the longest time
    without progress that is usual for its role and phase. ``hang_min_s`` and ``hang_max_s`` bound the result."""
    hang_min_s: Seconds = 30.0
    """A member never counts as hung before its work made no progress for this many seconds."""
    hang_max_s: Seconds = 600.0
    """A member always counts as hung once its work made no progress for this many seconds, unless it has said that the
    work takes longer: then at most ``hang_factor`` times this many seconds after its expected end. This is the only
    limit of a phase that was seen fewer than three times. Set it above every timeout of the work itself. On a machine
    with more work than cores each limit for a hang is up to four times as long."""
    reconcile_interval_s: Seconds = 0.5
    """Longest pause, in seconds, between two passes in which the leader compares the desired with the actual state. It
    is at least 1.5 while nothing of the job runs. What comes, goes, fails or is asked for starts a pass at once."""
    reconcile_deadline_s: Seconds = 30.0
    """Seconds without a successful reconcile pass after which the leader reports that it is not ready, and resigns so
    that another replica can try. After it has resigned for this reason it waits twice as long the next time, up to 15
    minutes, until a pass succeeds. Longer than etcd.retry_budget_s, so that an outage of etcd is not blamed on the
    leader."""
    max_events: Positive = 2000
    """Number of events kept in etcd; the leader deletes the oldest beyond it."""
    max_step_metrics: Annotated[int, Field(ge=100)] = 2000
    """Number of steps whose metrics are kept in etcd. Beyond it the leader thins out the older half evenly."""
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
    """Host name or address under which other replicas and clients reach the admin API. Empty: ``host`` or, where that
    is 0.0.0.0, the address of the route to etcd. With TLS the certificate must be valid for it."""
    tls_cert: PathText = ""
    """PEM file with the certificate (chain) of the admin API. With ``tls_key`` the API speaks TLS only. A renewed file
    is used without a restart. Empty: that of the host, in a cluster with an address (``up --address``), else no TLS."""
    tls_key: PathText = ""
    """PEM file with the private key of ``tls_cert``."""
    tls_ca: PathText = ""
    """PEM file of the authority against which replicas and clients verify the admin API. Empty: the authorities of the
    system."""
    max_requests: Positive = 128
    """Largest number of requests with a token or session that a replica works on at once; it refuses further ones with
    status 503. Requests without credentials have a limit of their own (32)."""
    max_streams: Positive = 64
    """Largest number of event streams that a replica serves at once; it refuses further ones with status 503."""
    max_body_bytes: Positive = 65536
    """Largest body of a request, in bytes; a larger one is refused with status 413."""
    request_timeout_s: Seconds = 10.0
    """Seconds within which a TLS handshake must end, and the headers of a request, and then its body, must arrive; else
    the connection is closed or the request refused."""

    @field_validator("ports")
    @classmethod
    def _require_different(cls, ports: list[int]) -> list[int]:
        if len(set(ports)) < len(ports):
            raise ValueError(f"{ports} has a port twice: each replica needs its own")
        return ports

    @property
    def scheme(self) -> str:
        """Scheme of the admin API's URLs."""
        return "https" if self.tls_cert else "http"

    @property
    def sends_tokens_in_clear(self) -> bool:
        """Whether tokens cross a network unencrypted: the API has no TLS and is bound to more than loopback."""
        if self.tls_cert or self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True
