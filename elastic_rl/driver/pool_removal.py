"""What is left in etcd of pools that the settings of a run have no more."""

from __future__ import annotations

from collections.abc import Collection

from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import EtcdClient, KeyValue, Op
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, ExternalEngine
from elastic_rl.runtime.sequences import batches

_OPS = 64
"""Keys that one transaction deletes."""


def remove_pools_except(etcd: EtcdClient, keys: Keys, writer: FencedWriter, names: Collection[str]) -> None:
    """Deletes the spec and status of every other pool, its autoscaling, the records of its engines, which ended with
    their epoch, and the registrations of servers for it. Its spec is deleted last, so that what was interrupted is done
    again. Raises Fenced and EtcdUnavailable."""
    found, _ = etcd.range(keys.pools_prefix())
    gone = {kv.key.removeprefix(keys.pools_prefix()).partition("/")[0] for kv in found} - set(names)
    for name in sorted(gone):
        engines, _ = etcd.range(keys.engines_of_pool(name))
        servers, _ = etcd.range(keys.external_engines_prefix())
        left: list[KeyValue] = [kv for e, kv in readable(engines, Engine) if e.pool == name]
        left += [kv for server, kv in readable(servers, ExternalEngine) if server.pool == name]
        for part in batches(left, _OPS):
            writer.write(*(Op.delete(kv.key) for kv in part))
        writer.emit(event_kinds.POOL_REMOVED, name, f"pool {name} is not in the settings any more")
        writer.write(Op.delete(keys.autoscaler(name)), Op.delete(keys.autoscaler_state(name)))
        writer.write(Op.delete(keys.pool_status(name)), Op.delete(keys.pool_spec(name)))
