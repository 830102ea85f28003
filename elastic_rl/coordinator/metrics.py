"""Metrics of the job, read from the store at each scrape: every replica shows the same job, whoever leads."""

from __future__ import annotations

from collections import Counter

from elastic_rl.coordinator.alerts import Alert
from elastic_rl.coordinator.election import Election
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.membership import members
from elastic_rl.coordinator.pools import all_pools
from elastic_rl.coordinator.records import Engine, EngineState, Epoch, JobStatus
from elastic_rl.coordinator.store import Store
from elastic_rl.errors import StoreUnavailable
from elastic_rl.telemetry import metrics

REQUESTS = metrics.counter("api_requests", "Requests to the admin API", ("method", "route", "status"))
REQUEST_S = metrics.histogram("api_request_seconds", "Duration of a request to the admin API", ("method", "route"))

_STORE_UP = metrics.gauge("store_up", "1 if etcd answered at this scrape")
_LEADER = metrics.gauge("is_leader", "1 if this replica leads")
_EPOCH = metrics.gauge("epoch", "Fencing epoch of the run")
_MEMBERS = metrics.gauge("members", "Registered processes", ("role",))
_DESIRED = metrics.gauge("pool_desired", "Engines that the operator wants", ("pool",))
_ACTUAL = metrics.gauge("pool_engines", "Engines of a pool by what they do", ("pool", "state"))
_ENGINES = metrics.gauge("engines", "Engines by state", ("state",))
_ENGINE_VERSION = metrics.gauge("engine_version", "Policy version verified in an engine", ("engine",))
_STEP = metrics.gauge("job_step", "Optimiser steps of RL that are done")
_STEPS = metrics.gauge("job_steps", "Optimiser steps that the run shall do")
_REWARD = metrics.gauge("job_reward", "Mean reward of the last step")
_HELDOUT = metrics.gauge("job_heldout", "Last held-out accuracy, 0 to 1")
_STALENESS = metrics.gauge("job_staleness_versions", "Versions the oldest sample of the last step lay behind")
_VERSION = metrics.gauge("policy_version", "Newest committed policy version")
_ALERTS = metrics.gauge("alerts_firing", "Alerts that are firing", ("kind",))
_EVENTS = metrics.gauge("events_kept", "Events in the store")


def scrape(store: Store, keys: Keys, election: Election) -> bytes:
    """Reads the store and returns every metric in the Prometheus text format. Without a store the job's numbers are
    those of the last scrape and ``elastic_rl_store_up`` is 0."""
    _LEADER.set(election.is_leader)
    try:
        _read(store, keys)
        _STORE_UP.set(1)
    except StoreUnavailable:
        _STORE_UP.set(0)
    return metrics.render()


def _read(store: Store, keys: Keys) -> None:
    epoch, job = store.get(keys.epoch()), store.get(keys.job_status())
    engines = [Engine.decode(kv.value) for kv in store.range(keys.engines_prefix())[0]]
    pools, roles = all_pools(store, keys), Counter(m.role for m in members(store, keys))
    alerts = [Alert.decode(kv.value) for kv in store.range(keys.alerts_prefix())[0]]
    _EPOCH.set(Epoch.decode(epoch.value).number if epoch else 0)
    for gauge in (_MEMBERS, _DESIRED, _ACTUAL, _ENGINE_VERSION, _ALERTS):
        gauge.clear()  # what has gone must not be shown for ever
    for role, n in roles.items():
        _MEMBERS.labels(role).set(n)
    for pool in pools:
        _DESIRED.labels(pool.name).set(pool.desired)
        for state in ("ready", "starting", "draining"):
            _ACTUAL.labels(pool.name, state).set(getattr(pool, state))
    states = Counter(e.state for e in engines)
    for state in EngineState:
        _ENGINES.labels(state.value).set(states[state])
    for engine in engines:
        _ENGINE_VERSION.labels(engine.id).set(engine.version)
    for kind, n in Counter(a.kind for a in alerts if a.phase == "firing").items():
        _ALERTS.labels(kind).set(n)
    _EVENTS.set(store.count(keys.events_prefix()))
    if job:
        status = JobStatus.decode(job.value)
        for numbers, value in ((_STEP, status.step), (_STEPS, status.steps), (_REWARD, status.reward),
                               (_HELDOUT, status.heldout), (_STALENESS, status.staleness),
                               (_VERSION, status.policy_version)):
            if value is not None:
                numbers.set(value)
