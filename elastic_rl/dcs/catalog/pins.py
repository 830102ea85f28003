"""Pins: leased keys that keep a committed version from being released."""

from __future__ import annotations

from collections.abc import Collection

from elastic_rl.dcs.catalog.reads import get_entry, head_entry
from elastic_rl.errors import Conflict, VersionNotFound
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version, VersionState
from elastic_rl.etcd.transaction import MAX_OPS

_TRIES = 16


MAX_ENDED = MAX_OPS - 1
"""Most pins that end together with a new one."""


def pin(etcd: EtcdClient, keys: Keys, stream: str, number: int | None, holder: str, lease: int,
        ended: Collection[str] = ()) -> Version:
    """Keeps a committed version (the head for None) from release while ``lease`` lives or until ``unpin``.

    ``ended``: keys of other pins, at most ``MAX_ENDED``, which end in the same transaction. Raises VersionNotFound, and
    Conflict when the version changed during every try; then none has ended.
    """
    for _ in range(_TRIES):
        entry = head_entry(etcd, keys, stream) if number is None else get_entry(etcd, keys, stream, number)
        if entry is None or entry.version.state is not VersionState.COMMITTED:
            what = f"version {number}" if number is not None else "committed version"
            state = f" (it is {entry.version.state})" if entry else ""
            raise VersionNotFound(f"stream {stream} of job {keys.job} has no {what}{state}")
        version = entry.version
        if etcd.txn([Compare.mod(keys.version(stream, version.number), "==", entry.revision)],
                    [Op.put(keys.pin(stream, version.number, holder), b"{}", lease), *map(Op.delete, ended)]
                    ).succeeded:
            return version
        # The record changed: an explicit version is GONE by now, which the next read finds; the head was replaced.
    raise Conflict(f"the record of {stream} changed during each of {_TRIES} tries to pin it")


def unpin(etcd: EtcdClient, keys: Keys, stream: str, number: int, holder: str) -> None:
    end(etcd, [keys.pin(stream, number, holder)])


def end(etcd: EtcdClient, ended: Collection[str]) -> None:
    """Ends the pins with these keys, at most ``MAX_ENDED``, in one transaction."""
    etcd.txn((), [*map(Op.delete, ended)])


def pinned(etcd: EtcdClient, keys: Keys, stream: str) -> set[int]:
    """Numbers of the versions that have a pin."""
    return set(pin_holders(etcd, keys, stream))


def pin_holders(etcd: EtcdClient, keys: Keys, stream: str) -> dict[int, list[str]]:
    """Number of each pinned version → who pins it."""
    prefix = keys.pins_prefix(stream)
    out: dict[int, list[str]] = {}
    for kv in etcd.range(prefix)[0]:
        number, _, holder = kv.key.removeprefix(prefix).partition("/")
        out.setdefault(int(number), []).append(holder)
    return out
