"""Autoscaling of pools as operators set it: what the settings say, until it is set through the API.

The record of a pool takes the place of the settings, also with autoscaling disabled, so that a restart of the job
changes nothing that an operator has decided. Each change is one transaction with its event, under the leader's fencing
token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from pydantic import ConfigDict

from elastic_rl.config import ROLLOUT_POOL, Config
from elastic_rl.config.autoscale import AutoscaleFields
from elastic_rl.coordinator import etags
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.leader_transaction import LeaderTransaction
from elastic_rl.coordinator.problems import Kind, Problem, concurrent_modification, no_pool
from elastic_rl.coordinator.write_set import WriteSet
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Autoscaler, AutoscalerState
from elastic_rl.runtime.words import counted

_TRIES = 8
_FIELDS = frozenset(AutoscaleFields.model_fields)


class AutoscalerView(AutoscaleFields):
    """Autoscaling of a pool as the API shows it. ``etag`` goes into If-Match of a change."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    pool: str
    source: Literal["settings", "api"]
    """Whether it is as the job's settings have it, or was set through the API."""
    by: str = ""
    """Who has set it through the API."""
    at: float = 0.0
    """Unix seconds at which that was."""
    recommended: int = 0
    """The number that a dry run would have set last; 0 for none."""
    message: str = ""
    """What the leader goes by, and what it waits for."""
    updated_at: float = 0.0
    """Unix seconds at which the leader wrote that."""
    etag: str


def fields_of(settings: AutoscaleFields) -> dict[str, Any]:
    """What an autoscaler goes by, without whose it is."""
    return settings.model_dump(include=set(_FIELDS))


def effective(record: Autoscaler | None, cfg: Config, pool: str) -> AutoscaleFields:
    """What holds for a pool, with bounds within ``coordinator.max_engines``, which may have been lowered since.
    ``record``: what was set through the API, if anything was."""
    found, most = record if record is not None else cfg.autoscale_settings(pool), cfg.coordinator.max_engines
    if found.max_engines <= most:
        return found
    return found.model_copy(update={"min_engines": min(found.min_engines, most), "max_engines": most})


def require_within(etcd: EtcdClient, keys: Keys, cfg: Config, pool: str, desired: int) -> Compare:
    """The condition under which a desired number is within the bounds of the pool's autoscaling. Raises problems: 409
    for one beyond them, and where this release cannot read them."""
    key = keys.autoscaler(pool)
    found = etcd.get(key)
    settings = effective(_decoded(found) if found else None, cfg, pool)
    if settings.bounds_hold and not settings.min_engines <= desired <= settings.max_engines:
        raise Problem(409, Kind.CONFLICT, "The number is beyond the bounds of autoscaling",
                      f"pool {pool} is autoscaled from {settings.min_engines} to "
                      f"{counted(settings.max_engines, 'engine')}: choose a number within, change the "
                      f"bounds, or disable it (`elastic-rl autoscale {pool} --off`)")
    return Compare.mod(key, "==", found.mod_revision if found else 0)


def get(etcd: EtcdClient, keys: Keys, cfg: Config, pool: str) -> AutoscalerView:
    """Raises a 404 problem for the pool, and for a record that this release cannot read."""
    if etcd.get(keys.pool_spec(pool)) is None:
        raise no_pool(pool)
    try:
        return _view(pool, etcd.get(keys.autoscaler(pool)), etcd.get(keys.autoscaler_state(pool)), cfg)
    except Problem as e:
        raise Problem(404, Kind.NOT_FOUND, "Not found", e.detail) from e


def change(etcd: EtcdClient, keys: Keys, cfg: Config, election: Election, pool: str, wanted: AutoscaleFields | None, *,
           by: str, if_revision: int | None = None, dry_run: bool = False,
           clock: Callable[[], float] = time.time) -> AutoscalerView:
    """Sets autoscaling of a pool, or disables it (``wanted`` None), and returns it as it is then. ``if_revision``: the
    record's revision that the change was made from, None for any. ``dry_run``: returns it as it would be.

    Raises problems: 404 for the pool; 409 where engines share the trainer's devices, and for a record that this
    release cannot read; 412 when it has changed; 422 for bounds beyond ``coordinator.max_engines``; 503 when this
    replica does not lead. Raises OutcomeUnknown.
    """
    if wanted is not None:
        _require_possible(cfg, pool, wanted)
    for _ in range(_TRIES):
        spec, found = etcd.get(keys.pool_spec(pool)), etcd.get(keys.autoscaler(pool))
        if spec is None:
            raise no_pool(pool)
        etags.check_revision(found.mod_revision if found else 0, if_revision, "autoscaling of the pool")
        before = _decoded(found) if found else None
        holds = effective(before, cfg, pool)
        after = wanted or holds.model_copy(update={"mode": "disabled"})
        state = etcd.get(keys.autoscaler_state(pool))
        # Without a record it is written also where it equals the settings, which may be others after the next start.
        if found is not None and fields_of(after) == fields_of(holds):
            return _view(pool, found, state, cfg)
        record = Autoscaler.model_validate({**fields_of(after), "pool": pool, "by": by, "at": clock()})
        if dry_run:
            return _shown(pool, record, found.mod_revision if found else 0, None, cfg)
        writes = WriteSet()
        writes.require(Compare.exists(keys.pool_spec(pool)))
        writes.put(keys.autoscaler(pool), found.mod_revision if found else 0, record)
        event = events.build(event_kinds.POOL_AUTOSCALING_CHANGED, pool, f"{pool}: {_described(record)}, by {by}",
                             by=by, replica=election.replica, **fields_of(record))
        done = LeaderTransaction.with_event(keys, event, writes.compares, writes.ops)
        if revision := done.commit(etcd, election.writer):
            return _shown(pool, record, revision, None, cfg)
    raise concurrent_modification()


def page(etcd: EtcdClient, keys: Keys, cfg: Config, pools: list[str]) -> list[AutoscalerView]:
    """Autoscaling of these pools, but of those whose record this release cannot read."""
    shown = []
    for pool in pools:
        try:
            shown.append(_view(pool, etcd.get(keys.autoscaler(pool)), etcd.get(keys.autoscaler_state(pool)), cfg))
        except Problem:
            continue
    return shown


def _require_possible(cfg: Config, pool: str, wanted: AutoscaleFields) -> None:
    most = cfg.coordinator.max_engines
    if wanted.max_engines > most:
        raise Problem(422, Kind.INVALID, "The request is not valid",
                      f"max_engines must be at most {most} (the setting coordinator.max_engines), not "
                      f"{wanted.max_engines}", errors=[{"pointer": "/max_engines", "detail": f"at most {most}"}])
    if pool == ROLLOUT_POOL and cfg.colocated and wanted.mode != "disabled":
        raise Problem(409, Kind.CONFLICT, "The pool cannot be autoscaled",
                      "its engines are on the trainer's devices, whose number bounds theirs (placement=colocated)")


def _decoded(found: KeyValue) -> Autoscaler:
    unreadable: dict[str, str] = {}
    record = decode(found, Autoscaler, unreadable)
    if record is None:
        raise Problem(409, Kind.CONFLICT, "The autoscaling of the pool cannot be read",
                      f"{unreadable[found.key]}: it may be of a later release; change it with that one")
    return record


def _view(pool: str, found: KeyValue | None, state: KeyValue | None, cfg: Config) -> AutoscalerView:
    record = _decoded(found) if found else None
    return _shown(pool, record, found.mod_revision if found else 0,
                  decode(state, AutoscalerState, {}) if state else None, cfg)


def _shown(pool: str, record: Autoscaler | None, revision: int, state: AutoscalerState | None, cfg: Config
           ) -> AutoscalerView:
    of_api: dict[str, Any] = {"source": "api", "by": record.by, "at": record.at} if record else {"source": "settings"}
    observed = {"recommended": state.recommended, "message": state.message, "updated_at": state.updated_at
                } if state is not None else {}
    return AutoscalerView.model_validate({**fields_of(effective(record, cfg, pool)), **of_api, **observed, "pool": pool,
                                          "etag": etags.etag(revision)})


def _described(settings: AutoscaleFields) -> str:
    if settings.mode == "disabled":
        return "autoscaling is disabled"
    how = {"automatic": "autoscaled", "dry_run": "a dry run of autoscaling", "external": "autoscaled from outside"}
    return f"{how[settings.mode]} from {settings.min_engines} to {counted(settings.max_engines, 'engine')}"
