"""Pins: leased keys that keep a committed version from being released."""

from __future__ import annotations

from elastic_rl.dcs.catalog.reads import get_entry, head_entry
from elastic_rl.errors import Conflict, VersionNotFound
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version, VersionState

_TRIES = 16


def pin(etcd: EtcdClient, keys: Keys, stream: str, number: int | None, holder: str, lease: int) -> Version:
    """Keeps a committed version (the head for None) from release while ``lease`` lives or until ``unpin``.

    Raises VersionNotFound, and Conflict when the version changed during every try.
    """
    for _ in range(_TRIES):
        entry = head_entry(etcd, keys, stream) if number is None else get_entry(etcd, keys, stream, number)
        if entry is None or entry.version.state is not VersionState.COMMITTED:
            what = f"version {number}" if number is not None else "committed version"
            state = f" (it is {entry.version.state})" if entry else ""
            raise VersionNotFound(f"stream {stream} of job {keys.job} has no {what}{state}")
        version = entry.version
        if etcd.txn([Compare.mod(keys.version(stream, version.number), "==", entry.revision)],
                    [Op.put(keys.pin(stream, version.number, holder), b"{}", lease)]).succeeded:
            return version
        # The record changed: an explicit version is GONE by now, which the next read finds; the head was replaced.
    raise Conflict(f"the record of {stream} changed during each of {_TRIES} tries to pin it")


def unpin(etcd: EtcdClient, keys: Keys, stream: str, number: int, holder: str) -> None:
    etcd.delete(keys.pin(stream, number, holder))


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
