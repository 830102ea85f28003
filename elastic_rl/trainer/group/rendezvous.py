"""Rendezvous of torch elastic agents over etcd v3, as the plug-in ``elastic-rl-etcd3`` of ``torchrun.handlers``.

torch's own etcd backends use the v2 API. Here the state is one key, changed by compare-and-set on its mod revision, and
the store that agents share is in etcd too, so that it survives any agent. Use it with
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: otherwise a joining agent waits for a TCP store that no process serves.

Endpoint: ``host:port[,host:port…]``. Options (``--rdzv-conf``): ``prefix`` (default ``/elastic_rl/rendezvous/``),
``store_timeout_s``, and the settings of etcd as the configuration has them: ``call_timeout_s``, ``retry_budget_s``,
``tls_ca``, ``tls_cert``, ``tls_key``, ``tls_server_name``, ``user``, ``password_file``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store as TorchStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from elastic_rl import config
from elastic_rl.config import EtcdConfig
from elastic_rl.errors import ElasticRLError, EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.transaction import Compare, Op

log = logging.getLogger(__name__)

BACKEND = "elastic-rl-etcd3"
_STATE_TTL_S = 2 * 3600
"""Keys of agents that were killed expire after this, where no driver has deleted them before (``TrainerGroup``); an
agent that ends cleanly deletes its keys at once."""


class _Lease:
    """A lease for keys; replaced at half its life, so that a key outlives its last writer by hours at most."""

    def __init__(self, etcd: EtcdClient) -> None:
        self._etcd, self._id, self._until = etcd, 0, 0.0

    def id(self) -> int:
        if time.monotonic() > self._until:
            self._id = self._etcd.grant(_STATE_TTL_S)
            self._until = time.monotonic() + _STATE_TTL_S / 2
        return self._id


class Etcd3Backend(RendezvousBackend):
    """The rendezvous state; its fencing token is the key's mod revision."""

    def __init__(self, etcd: EtcdClient, key: str) -> None:
        self._etcd, self._key, self._lease = etcd, key, _Lease(etcd)
        self._last: tuple[bytes, Token] | None = None

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token, or None before the first write. While etcd is away: as they were read last, since an
        agent whose ranks work must not end for it; a write with such a token is refused."""
        try:
            kv = self._etcd.get(self._key)
        except EtcdUnavailable as e:
            if self._last is None:
                raise RendezvousConnectionError(str(e)) from e
            log.warning("the rendezvous goes by what it knows: %s", e)
            return self._last
        except ElasticRLError as e:
            raise RendezvousConnectionError(str(e)) from e
        self._last = None if kv is None else (kv.value, kv.mod_revision)
        return self._last

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Writes if the token is still current (None: if there is no state); returns the state that holds then, its
        token, and whether it is the one that was passed. While etcd is away: the state as ``get_state`` has it, which
        is not that one; torch tries again."""
        guard = Compare.absent(self._key) if token is None else Compare.mod(self._key, "==", int(token))
        try:
            result = self._etcd.txn([guard], [Op.put(self._key, state, lease=self._lease.id())], [Op.get(self._key)])
        except EtcdUnavailable as e:
            if self._last is None:
                raise RendezvousConnectionError(str(e)) from e
            return *self._last, False
        except ElasticRLError as e:
            raise RendezvousConnectionError(str(e)) from e
        if result.succeeded:
            self._last = state, result.revision
            return *self._last, True
        self._last = (result.kvs[0].value, result.kvs[0].mod_revision) if result.kvs else None
        return (*self._last, False) if self._last is not None else None


class Etcd3Store(TorchStore):
    """The c10d store that agents share: ranks, the master's address, the exit barrier. Ranks do not use it."""

    def __init__(self, etcd: EtcdClient, prefix: str, *, timeout_s: float) -> None:
        super().__init__()
        self._etcd, self._prefix, self._timeout_s, self._lease = etcd, prefix, timeout_s, _Lease(etcd)

    def _key(self, key: str | bytes) -> str:
        return self._prefix + (key if isinstance(key, str) else key.decode())

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._etcd.put(self._key(key), raw, lease=self._lease.id())

    def get(self, key: str) -> bytes:
        self.wait([key])
        kv = self._etcd.get(self._key(key))
        if kv is None:
            raise LookupError(f"the key {key!r} was deleted while it was read")
        return kv.value

    def add(self, key: str, value: int) -> int:
        written = self._etcd.update(self._key(key), lambda old: str(int(old or 0) + value).encode(),
                                     lease=self._lease.id())
        return int(written or 0)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Puts ``desired`` if the value is ``expected`` or, with an empty ``expected``, if there is none; returns the
        value that holds then (``expected`` for an absent key, as c10d does)."""
        expected, desired = (v.encode() if isinstance(v, str) else bytes(v) for v in (expected_value, desired_value))
        name = self._key(key)
        guard = Compare.value(name, "==", expected) if expected else Compare.absent(name)
        result = self._etcd.txn([guard], [Op.put(name, desired, lease=self._lease.id())], [Op.get(name)])
        if result.succeeded:
            return desired
        return result.kvs[0].value if result.kvs else expected

    def check(self, keys: list[str]) -> bool:
        return all(self._etcd.get(self._key(k)) is not None for k in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        limit = timeout.total_seconds() if timeout is not None else self._timeout_s
        end, pause_s = time.monotonic() + limit, 0.02
        while not self.check(keys):
            if time.monotonic() > end:
                # c10d's callers recognise a timeout by this type
                raise LookupError(f"timed out after {limit:g} s waiting for {keys}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, 0.5)  # there may be a thousand agents

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:  # type: ignore[override]
        return timedelta(seconds=self._timeout_s)

    def delete_key(self, key: str) -> bool:
        return self._etcd.delete(self._key(key))


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Called by torch elastic. Raises ConfigError; the handler raises RendezvousConnectionError when etcd is away."""
    endpoints = [e.strip() for e in params.endpoint.split(",") if e.strip()]
    given = {name: params.get(name) for name in EtcdConfig.model_fields if params.get(name) is not None}
    cfg = config.parse({"etcd": {**given, "endpoints": endpoints}}).etcd
    if params.get_as_bool("follow_members", False):
        cfg = cfg.model_copy(update={"endpoints": []})
    etcd = EtcdClient.from_config(cfg, endpoints)
    prefix = f"{params.get('prefix', '/elastic_rl/rendezvous/')}{params.run_id}/"
    shared = Etcd3Store(etcd, prefix + "store/", timeout_s=float(params.get("store_timeout_s", 60.0)))
    return create_handler(shared, Etcd3Backend(etcd, prefix + "state"), params)


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point: returns the creator of handlers."""
    return create
