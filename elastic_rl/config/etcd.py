"""Connection to etcd."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import PathText, Positive, Seconds, Section


class EtcdConfig(Section):
    endpoints: list[str] = []
    """Addresses (``host:port``) of the members of an etcd that someone else runs. Empty: ``elastic-rl up`` starts one
    member, and hosts that join may have further ones."""
    call_timeout_s: Seconds = 0.5
    """Seconds that one attempt on one member may take before the call is tried on another one."""
    retry_budget_s: Seconds = 15.0
    """Seconds for which a call is tried on one member after the other before it fails with EtcdUnavailable."""
    follow_members_s: Seconds = 30.0
    """Seconds after which a client of an etcd that ``up`` started asks for its members again. A new member has its vote
    after 1.5 times as long, so that no client is left with members that are gone. A client of ``endpoints`` knows these
    alone."""
    start_timeout_s: Seconds = 20.0
    """Seconds that ``elastic-rl up`` waits until an etcd that it started is healthy."""
    quota_bytes: Positive = 2 << 30
    """Largest size of the database (``--quota-backend-bytes``) of an etcd that ``up`` starts; of one that someone else
    runs, what is assumed where its members do not report theirs. Alerts and maintenance are measured against it."""
    history_s: Annotated[float, Field(ge=0)] = 300.0
    """Seconds of history that the leader keeps in etcd by compacting older revisions; once half of the quota is in use
    it keeps at most 30 s. A watch or a listing that is further behind starts over. 0: never compact, for an etcd with
    ``--auto-compaction-retention``."""
    reclaim_space: bool = True
    """Whether the coordinators make room in an etcd whose database reaches its quota: compact all history, defragment
    the members one by one (a member does not answer meanwhile), end the alarm NOSPACE. Needs etcd's root role where
    etcd has users. Turn it off where others maintain etcd; without either, a full etcd accepts no writes."""

    tls_ca: PathText = ""
    """PEM file of the authority that signed the members' certificates, for an etcd that someone else runs
    (``endpoints``). When it is set, every connection to etcd uses TLS. A cluster with an address makes its own."""
    tls_cert: PathText = ""
    """PEM file with this client's certificate, for an etcd that runs with ``--client-cert-auth``."""
    tls_key: PathText = ""
    """PEM file with the private key of ``tls_cert``."""
    tls_server_name: str = ""
    """Host name that the members' certificates are valid for, where it differs from that in ``endpoints``."""
    user: str = ""
    """User name for an etcd with authentication. The user needs read and write access to the prefix
    ``/elastic_rl/``."""
    password_file: PathText = ""
    """Text file with the user's password. It is read at each sign-in, so a new password needs no restart."""
