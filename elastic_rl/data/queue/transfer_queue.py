"""Samples in the storage units of TransferQueue, as a client sees them: one row of bytes for each.

The actor writes and reads them, and the ranks of trainer groups read their own. The package's wire is pickle in part;
what this module writes is bytes in which nothing is pickled (``group_codec``), and it unpickles nothing of a sample.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

import torch

from elastic_rl.data.queue.group_codec import decode_group, encode_group
from elastic_rl.data.queue.step_groups import SampleRef
from elastic_rl.data.samples import Group, Prompt, Sample
from elastic_rl.errors import ConfigError, GroupsLost, QueueUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

_PARTITION, _FIELD = "groups", "group"
_ROW = struct.Struct("<QQ")
"""Ordinal and index, before the sample: the package gives rows without a name, and leaves out those that it lacks."""
LOOK_EVERY_S = 2.0
"""While a call is not answered."""


def set_package_options(call_s: float) -> None:
    """Sets what the package reads from the environment when it is imported. ``call_s``: the limit of one call, in which
    it may give up."""
    os.environ.setdefault("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", str(max(1, int(call_s))))  # its own is over 3 minutes
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")  # it warns in each call


def import_package(call_s: float) -> None:
    """Imports the package, which takes seconds. ``call_s``: see ``set_package_options``."""
    set_package_options(call_s)
    import transfer_queue  # noqa: F401


def encode_rows(group: Group) -> dict[SampleRef, bytes]:
    """Each sample as a group of its own, after what names it. Raises PluginFailed for metadata that JSON does not have.
    """
    return {(group.ordinal, index): _ROW.pack(group.ordinal, index) + encode_group(
        Group(group.ordinal, group.prompt, (sample,), group.failed)) for index, sample in enumerate(group.samples)}


def decode_row(raw: bytes) -> tuple[SampleRef, Prompt, Sample]:
    """Raises ValueError for anything but a row of ``encode_rows``."""
    try:
        ordinal, index = _ROW.unpack_from(raw)
    except struct.error as e:
        raise ValueError(f"not a sample: {e}") from e
    group = decode_group(raw[_ROW.size:])
    if group.ordinal != ordinal or len(group.samples) != 1:
        raise ValueError("not a sample: it is of another group, or not alone")
    return (ordinal, index), group.prompt, group.samples[0]


class RowClient:
    """A client of one controller and its storage units. Its calls block; ``within`` bounds them."""

    def __init__(self, name: str, controller: Any, units: Mapping[str, Any]) -> None:
        """``controller``, ``units``: the package's ``ZMQServerInfo``, units by name. Raises whatever the package
        raises."""
        from transfer_queue import TransferQueueClient

        self._client: Any = TransferQueueClient(name, controller)
        self._client.initialize_storage_manager("SimpleStorage", {
            "num_data_storage_units": len(units), "total_storage_size": None, "zmq_info": dict(units)})
        self.address: dict[str, Any] = {"controller": _told(controller),
                                        "units": {key: _told(info) for key, info in units.items()}}

    @classmethod
    def at(cls, name: str, address: Mapping[str, Any]) -> RowClient:
        """Raises ConfigError for anything but the ``address`` of another client."""
        from transfer_queue.utils.enum_utils import Role
        from transfer_queue.utils.zmq_utils import ZMQServerInfo

        def info(role: Role, told: Mapping[str, Any]) -> ZMQServerInfo:
            return ZMQServerInfo(role, str(told["id"]), str(told["ip"]),
                                 {str(name): int(port) for name, port in told["ports"].items()})

        try:
            controller = info(Role.CONTROLLER, address["controller"])
            units = {str(key): info(Role.STORAGE, told) for key, told in address["units"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise ConfigError(f"not the address of a queue: {type(e).__name__}: {e}") from e
        return cls(name, controller, units)

    def put(self, rows: Mapping[SampleRef, bytes]) -> None:
        from tensordict import TensorDict

        tensors = [torch.frombuffer(bytearray(raw), dtype=torch.uint8) for raw in rows.values()]
        field = tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.nested.as_nested_tensor(
            tensors, layout=torch.jagged)
        self._client.put(TensorDict({_FIELD: field}, batch_size=[len(tensors)]), self._meta(rows, create=True))

    def get(self, refs: Sequence[SampleRef]) -> dict[SampleRef, tuple[Prompt, Sample]]:
        """Those that it has, as they were written."""
        meta = self._meta(refs)
        found = self._client.get_data(meta) if meta.size else {}
        rows: dict[SampleRef, tuple[Prompt, Sample]] = {}
        if _FIELD not in found.keys():  # noqa: SIM118  # a TensorDict has no `in` of its own
            return rows
        for row in found[_FIELD].unbind():
            try:
                ref, prompt, sample = decode_row(row.numpy().tobytes())
            except ValueError as e:
                log.warning("a sample in TransferQueue cannot be read: %s", e)
                continue
            rows[ref] = prompt, sample
        return rows

    def drop(self, refs: Iterable[SampleRef]) -> None:
        meta = self._meta(refs)
        if meta.size:
            self._client.clear_samples(meta)

    def _meta(self, refs: Iterable[SampleRef], *, create: bool = False) -> Any:
        return self._client.kv_retrieve_meta([f"{ordinal}/{index}" for ordinal, index in refs], _PARTITION, create)

    def close(self) -> None:
        """It waits for calls that no actor answers any more: so in a thread."""
        threading.Thread(target=self._client.close, name="transfer-queue-close", daemon=True).start()


def _told(info: Any) -> dict[str, Any]:
    return {"id": info.id, "ip": info.ip, "ports": dict(info.ports)}


def require_found(refs: Sequence[SampleRef], found: Callable[[SampleRef], bool]) -> None:
    """Raises GroupsLost for samples that are not found."""
    if lost := sorted({ref[0] for ref in refs if not found(ref)}):
        shown = ", ".join(map(str, lost[:8])) + (", …" if len(lost) > 8 else "")
        raise GroupsLost(f"the queue has lost samples of {len(lost)} groups ({shown})", lost)


def within(limit_s: float, calls: Sequence[Callable[[], T]], look: Callable[[], None] = lambda: None) -> list[T]:
    """What the calls return, which run at once. Raises what one of them raises, what ``look`` raises, which is called
    now and then meanwhile, and TimeoutError once they have taken so long. It leaves the threads to their fate then:
    they are daemons, since a call of a dead actor may never end, and would hold up the end of this process."""
    futures, end = [Future[T]() for _ in calls], time.monotonic() + limit_s

    def work(future: Future[T], call: Callable[[], T]) -> None:
        try:
            future.set_result(call())
        except BaseException as e:
            future.set_exception(e)

    for future, call in zip(futures, calls, strict=True):
        threading.Thread(target=work, args=(future, call), name="transfer-queue", daemon=True).start()
    while True:
        left_s = end - time.monotonic()
        done, running = wait(futures, max(0.0, min(left_s, LOOK_EVERY_S)), return_when=FIRST_EXCEPTION)
        if error := next((error for future in done if (error := future.exception())), None):
            raise error
        if not running:
            return [future.result() for future in futures]
        if left_s <= LOOK_EVERY_S:
            raise TimeoutError(f"no answer within train.queue_call_timeout_s={limit_s:g} s; if its actors are well, "
                               "the groups are too large for it: raise it")
        look()


class RemoteSamples:
    """Samples in queues of other processes, of which one is read at a time: the newest. Thread-safe."""

    def __init__(self, call_s: float) -> None:
        """``call_s``: limit of one read. Imports the package."""
        import_package(call_s)
        self._call_s = call_s
        self._lock = threading.Lock()
        self._client: RowClient | None = None

    def at(self, address: Mapping[str, Any]) -> SamplesAt:
        return SamplesAt(self, address)

    def read(self, address: Mapping[str, Any], refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        """See ``SampleReader.read``. Raises ConfigError for what is no address."""
        client = self._client_of(address)
        try:
            [found] = within(self._call_s, [lambda: client.get(refs)])
        except Exception as e:  # of the package: whatever it raises for an actor that is gone
            self._forget(client)  # it may be at fault itself
            raise QueueUnavailable(f"TransferQueue failed: {type(e).__name__}: {e}") from e
        require_found(refs, found.__contains__)
        return [found[ref] for ref in refs]

    def _client_of(self, address: Mapping[str, Any]) -> RowClient:
        with self._lock:
            if self._client is not None and self._client.address == address:
                return self._client
        try:
            made = RowClient.at(f"elastic-rl-rank-{os.getpid()}-{time.monotonic_ns()}", address)
        except ConfigError:
            raise
        except Exception as e:  # as above
            raise QueueUnavailable(f"TransferQueue cannot be reached: {type(e).__name__}: {e}") from e
        with self._lock:
            before, self._client = self._client, made
        if before is not None:
            before.close()
        return made

    def _forget(self, client: RowClient) -> None:
        with self._lock:
            if self._client is client:
                self._client = None
        client.close()


class SamplesAt:
    """Those of one queue. A ``SampleReader``."""

    def __init__(self, samples: RemoteSamples, address: Mapping[str, Any]) -> None:
        self._samples, self.address = samples, address

    def read(self, refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        return self._samples.read(self.address, refs)

    def require(self, refs: Sequence[SampleRef]) -> None:
        """Nobody tells it."""
