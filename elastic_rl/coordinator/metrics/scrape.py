"""The answer to a Prometheus scrape: the metrics of this replica, of etcd and of every job."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from elastic_rl.config import Config
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.metrics import job_metrics
from elastic_rl.coordinator.snapshot import SnapshotReader
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient, MemberStatus
from elastic_rl.etcd.keys import Keys
from elastic_rl.telemetry import metrics

REQUESTS = metrics.counter("api_requests", "Requests to the admin API", ("method", "route", "status"))
REQUEST_S = metrics.histogram("api_request_seconds", "Duration of a request to the admin API", ("method", "route"))

_ETCD_UP = metrics.gauge("etcd_up", "1 if etcd answered at this scrape")
_LEADER = metrics.gauge("is_leader", "1 if this replica leads")
_SCRAPE_S = metrics.gauge("scrape_etcd_seconds", "Time that reading etcd took at this scrape")


class _Page:
    """Metric families of one scrape."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> list[Metric]:
        return self._found


def scrape(etcd: EtcdClient, jobs: Iterable[tuple[Keys, Config]], failing: Mapping[str, bool],
           election: Election) -> bytes:
    """Reads etcd and returns every metric in the Prometheus text format. Without etcd ``elastic_rl_etcd_up`` is 0 and
    the metrics of the jobs are missing: an old value would look like a fresh one. ``failing``: by job, whether
    something keeps this replica from deciding about it."""
    began = time.monotonic()
    found = [*_etcd(etcd.statuses()), _failing(failing)]
    try:
        found += job_metrics.merged({keys.job: _job(etcd, keys, cfg) for keys, cfg in jobs})
        _ETCD_UP.set(1)
    except EtcdUnavailable:
        _ETCD_UP.set(0)
    _SCRAPE_S.set(time.monotonic() - began)
    _LEADER.set(election.is_leader)
    return metrics.render() + generate_latest(_Page(found))  # type: ignore[arg-type]  # it needs collect alone


def _job(etcd: EtcdClient, keys: Keys, cfg: Config) -> list[Metric]:
    snapshot = SnapshotReader(etcd, keys, cfg).read()
    return job_metrics.families(snapshot, job_metrics.read_counters(etcd, snapshot))


def _failing(jobs: Mapping[str, bool]) -> Metric:
    family = GaugeMetricFamily(
        metrics.PREFIX + "job_reconcile_failing", "1 if this replica has not taken up the job, or leads and its "
        "reconcile passes over the job fail", labels=[metrics.JOB_LABEL])
    for job, failing in jobs.items():
        family.add_metric([job], failing)
    return family


def _etcd(statuses: list[MemberStatus]) -> list[Metric]:
    up = GaugeMetricFamily(metrics.PREFIX + "etcd_member_up", "1 if the etcd member answered", labels=["endpoint"])
    leads = GaugeMetricFamily(metrics.PREFIX + "etcd_member_is_leader", "1 if the etcd member leads",
                              labels=["endpoint"])
    size = GaugeMetricFamily(metrics.PREFIX + "etcd_db_bytes", "Size of the etcd member's database",
                             labels=["endpoint"])
    quota = GaugeMetricFamily(metrics.PREFIX + "etcd_quota_bytes", "Largest size that the database may have",
                              labels=["endpoint"])
    for status in statuses:
        up.add_metric([status.endpoint], not status.error)
        if not status.error:
            leads.add_metric([status.endpoint], status.is_leader)
            size.add_metric([status.endpoint], status.db_bytes)
            if status.quota_bytes:
                quota.add_metric([status.endpoint], status.quota_bytes)
    return [up, leads, size, quota]
