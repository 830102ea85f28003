"""Samples in the storage units of TransferQueue, as a client sees them: one row of bytes for each.

The actor writes and reads them, and the ranks of trainer groups read their own. The package's wire is pickle in part;
what this module writes is bytes in which nothing is pickled (``group_codec``), and it unpickles nothing of a sample.

A row is named by the attempt to put its group, too. So what an earlier attempt writes or drops late, when its call has
long been given up, is none of a later one's rows, and who asks for one attempt gets no samples of another. The package
keeps rows by a number, which it gives to another row when one was dropped: a call that it carries out after that may
still take away or replace the row that has the number then. So each row says in itself which one it is, and such a row
counts as gone. All rows of a queue are in a partition of the package that only this queue names, since a later one may
have the ports of an earlier one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from elastic_rl.data.queue.group_codec import decode_group, encode_group
from elastic_rl.data.queue.step_groups import SampleRef
from elastic_rl.data.samples import Group, Prompt, Sample
from elastic_rl.errors import ConfigError, GroupsLost, QueueUnavailable
from elastic_rl.runtime.abandonable import AbandonableCalls, CallRefused, CallTookTooLong
from elastic_rl.runtime.backoff import RetryBackoff

log = logging.getLogger(__name__)
T = TypeVar("T")

_FIELD = "group"
_ROW = struct.Struct("<QQQ")
"""The name of a row, before the sample: the package gives rows without a name, and leaves out those that it lacks."""
LOOK_EVERY_S = 2.0
"""Interval at which the caller looks for a reason while a call is not answered."""
_RETRY_S = (0.5, 10.0)
"""First and longest pause between a call that failed and the next client, which costs threads and sockets."""
_MAX_THREADS = 16
"""Calls of one connection that may run at once, with those that were given up."""
_REPLACE_S = 600.0
"""After so long in which calls that were given up held all threads, the next calls get other threads: those may never
end, and the end of the process would cost its trainer group more than they do."""
_MAX_REPLACED = 8
"""The most sets of threads at once that are all still held."""
_CANCEL_S = 5.0
"""Time within which the calls of a client that is closed must have ended."""


class RowName(NamedTuple):
    """What names the row of a sample."""

    attempt: int
    """Number of the attempt to put the group; the queue gives none twice."""
    ordinal: int
    """The group of the sample."""
    sample: int
    """The index of the sample in its group."""

    @property
    def key(self) -> str:
        """The name that the package knows."""
        return "/".join(map(str, self))

    @classmethod
    def from_key(cls, key: str) -> RowName:
        """Raises ValueError for anything but a ``key``."""
        try:
            return cls(*map(int, key.split("/")))
        except TypeError as e:
            raise ValueError(f"not the name of a row: {key[:80]!r}") from e


def set_package_options(call_s: float) -> None:
    """Sets what the package reads from the environment when it is imported. ``call_s``: the limit of one call, in which
    it may give up."""
    os.environ.setdefault("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", str(max(1, int(call_s))))  # its own is over 3 minutes
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")  # it warns in each call


def import_package(call_s: float) -> None:
    """Imports the package, which takes seconds. ``call_s``: see ``set_package_options``."""
    set_package_options(call_s)
    import transfer_queue  # noqa: F401


def encode_rows(group: Group, attempt: int) -> dict[RowName, bytes]:
    """Encodes each sample as a group of its own, after what names it. ``attempt``: see ``RowName``. Raises PluginFailed
    for metadata that JSON does not have."""
    names = [RowName(attempt, group.ordinal, index) for index in range(len(group.samples))]
    return {name: _ROW.pack(*name) + encode_group(Group(group.ordinal, group.prompt, (sample,), group.failed))
            for name, sample in zip(names, group.samples, strict=True)}


def decode_row(raw: bytes) -> tuple[RowName, Prompt, Sample]:
    """Raises ValueError for anything but a row of ``encode_rows``."""
    try:
        name = RowName(*_ROW.unpack_from(raw))
    except struct.error as e:
        raise ValueError(f"not a sample: {e}") from e
    group = decode_group(raw[_ROW.size:])
    if group.ordinal != name.ordinal or len(group.samples) != 1:
        raise ValueError("not a sample: it is of another group, or not alone")
    return name, group.prompt, group.samples[0]


def address_of(controller: Any, units: Mapping[str, Any], partition: str) -> dict[str, Any]:
    """JSON by which clients reach a queue. ``controller``, ``units``: the package's ``ZMQServerInfo``, units by name.
    ``partition``: names the rows of this queue; no other queue has it."""
    def told(info: Any) -> dict[str, Any]:
        return {"id": info.id, "ip": info.ip, "ports": dict(info.ports)}

    return {"controller": told(controller), "units": {key: told(info) for key, info in units.items()},
            "partition": partition}


_ATTEMPTS = "attempts"


def with_attempts(address: Mapping[str, Any], attempts: Mapping[int, int]) -> dict[str, Any]:
    """JSON by which another process reads the samples of these attempts. ``address``: an ``address_of``. ``attempts``:
    ordinal of a group → the attempt that brought its samples."""
    return {**address, _ATTEMPTS: {str(ordinal): attempt for ordinal, attempt in attempts.items()}}


def without_attempts(address: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, int]]:
    """What ``with_attempts`` was made of. Raises ConfigError."""
    try:
        attempts = {int(ordinal): int(attempt) for ordinal, attempt in address[_ATTEMPTS].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ConfigError(f"not the address of samples in a queue: {type(e).__name__}: {e}") from e
    return {key: value for key, value in address.items() if key != _ATTEMPTS}, attempts


def _servers(address: Mapping[str, Any]) -> tuple[Any, dict[str, Any], str]:
    """What ``address_of`` was made of. Raises ConfigError."""
    from transfer_queue.utils.enum_utils import Role
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    def info(role: Role, told: Mapping[str, Any]) -> ZMQServerInfo:
        return ZMQServerInfo(role, str(told["id"]), str(told["ip"]),
                             {str(name): int(port) for name, port in told["ports"].items()})

    try:
        return info(Role.CONTROLLER, address["controller"]), {
            str(key): info(Role.STORAGE, told) for key, told in address["units"].items()}, str(address["partition"])
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ConfigError(f"not the address of a queue: {type(e).__name__}: {e}") from e


class RowClient:
    """A client of one controller and its storage units. Its calls block; ``Connection`` bounds them."""

    def __init__(self, name: str, address: Mapping[str, Any]) -> None:
        """Raises ConfigError for anything but an ``address_of``, and whatever the package raises."""
        from transfer_queue import TransferQueueClient

        controller, units, self._partition = _servers(address)
        self._client: Any = TransferQueueClient(name, controller)
        try:
            self._client.initialize_storage_manager("SimpleStorage", {
                "num_data_storage_units": len(units), "total_storage_size": None, "zmq_info": units})
        except BaseException:
            self.close()  # it has threads and sockets by now
            raise

    def put(self, rows: Mapping[RowName, bytes]) -> None:
        """Writes rows, whose attempt nobody has put before."""
        from tensordict import TensorDict

        tensors = [torch.frombuffer(bytearray(raw), dtype=torch.uint8) for raw in rows.values()]
        field = tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.nested.as_nested_tensor(
            tensors, layout=torch.jagged)
        self._client.put(TensorDict({_FIELD: field}, batch_size=[len(tensors)]), self._meta(rows, create=True))

    def get(self, names: Sequence[RowName]) -> dict[RowName, tuple[Prompt, Sample]]:
        """The samples that the queue has, as they were written. The package gives none of a call's rows where one has a
        key and no data, since its put or drop was cut off: halves are asked for then, until such a row is alone."""
        from transfer_queue.storage.simple_storage import StorageKeyNotFoundError

        meta = self._meta(names)
        if not meta.size:
            return {}
        found: Any = {}
        with contextlib.suppress(StorageKeyNotFoundError):
            found = self._client.get_data(meta)
        if _FIELD not in found.keys():  # noqa: SIM118  # a TensorDict has no `in` of its own
            half = len(names) // 2
            return {**self.get(names[:half]), **self.get(names[half:])} if half else {}
        rows: dict[RowName, tuple[Prompt, Sample]] = {}
        for row in found[_FIELD].unbind():
            try:
                name, prompt, sample = decode_row(row.numpy().tobytes())
            except ValueError as e:
                log.warning("a sample in TransferQueue cannot be read: %s", e)
                continue
            rows[name] = prompt, sample
        return rows

    def names(self) -> list[RowName]:
        """The names of all rows of the queue, also of those whose data is not there (yet)."""
        return [RowName.from_key(key) for key in self._client.kv_list(self._partition).get(self._partition, ())]

    def drop(self, names: Iterable[RowName]) -> None:
        """Drops rows, as far as they are there."""
        meta = self._meta(names)
        if meta.size:
            self._client.clear_samples(meta)

    def _meta(self, names: Iterable[RowName], *, create: bool = False) -> Any:
        return self._client.kv_retrieve_meta([name.key for name in names], self._partition, create)

    def close(self) -> None:
        """Ends its calls, which raise. A thread does it, since the package waits for its own threads."""
        threading.Thread(target=self._close, name="transfer-queue-close", daemon=True).start()

    def _close(self) -> None:
        # The package stops its event loop under the calls in progress: their threads would wait for ever.
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._client._loop).result(_CANCEL_S)
        self._client.close()


async def _cancel_others() -> None:
    """Cancels all other tasks of this event loop, and waits for their end."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.wait(others)


def require_none_lost(groups: Iterable[int]) -> None:
    """Raises GroupsLost for these groups, if there are any."""
    if lost := sorted({*groups}):
        shown = ", ".join(map(str, lost[:8])) + (", …" if len(lost) > 8 else "")
        raise GroupsLost(f"the queue has lost samples of {len(lost)} groups ({shown})", lost)


class Connection:
    """Calls of one queue, by a client that is made for the first one, and for the next one after a failure: the client
    may be at fault itself. Thread-safe."""

    def __init__(self, name: str, address: Mapping[str, Any], call_s: float) -> None:
        """``address``: see ``address_of``. ``call_s``: limit of one call, with the time to make a client for it."""
        self._name, self.address, self._call_s = name, dict(address), call_s
        self._lock = threading.Lock()
        self._client: RowClient | None = None
        self._retry = RetryBackoff(*_RETRY_S)
        self._calls = AbandonableCalls("transfer-queue", _MAX_THREADS)
        """A call of a dead actor may never end."""
        self._replaced: list[AbandonableCalls] = []
        """Earlier calls, whose threads are all still held."""
        self._closed = False

    def run(self, call: Callable[[RowClient], T], look: Callable[[], None] = lambda: None) -> T:
        """What the call returns. Raises what it raises, what ``look`` raises, which is called now and then meanwhile,
        TimeoutError after the limit of a call, QueueUnavailable in the pause after a failure, and ConfigError for what
        is no address. After a failure other calls in progress fail too: they have the same client."""
        end = time.monotonic() + self._call_s
        with self._lock:
            client = self._client
            if self._closed:
                raise QueueUnavailable("the connection to TransferQueue is closed")
            if client is None and (left_s := self._retry.left_s(time.monotonic())):
                raise QueueUnavailable(f"TransferQueue has failed, and is tried again in {left_s:.1f} s")
        try:
            client = client or self._connect(end, look)
            found = self._within(end, partial(call, client), look)
        except BaseException:
            self._give_up(client)
            raise
        with self._lock:
            self._retry.reset()
        return found

    def _within(self, end: float, call: Callable[[], T], look: Callable[[], None],
                late: Callable[[T], object] = lambda found: None) -> T:
        """What the call returns. Raises as ``run``."""
        try:
            return self._calls.begin(call).result(
                look, every_s=LOOK_EVERY_S, limit_s=end - time.monotonic(), late=late)
        except CallTookTooLong:
            raise TimeoutError("no answer within train.queue_call_timeout_s; if its actors are well, the groups are "
                               "too large for it: raise it") from None
        except CallRefused as e:
            raise QueueUnavailable(f"TransferQueue does not answer: {e.message}") from e

    def _connect(self, end: float, look: Callable[[], None]) -> RowClient:
        made = self._within(end, lambda: RowClient(f"{self._name}-{time.monotonic_ns()}", self.address), look,
                            late=lambda made: made.close())
        with self._lock:
            if self._client is None and not self._closed:
                self._client = made
            current = self._client
        if current is not made:  # another thread was faster, or it was closed meanwhile
            made.close()
        if current is None:
            raise QueueUnavailable("the connection to TransferQueue is closed")
        return current

    def _give_up(self, client: RowClient | None) -> None:
        """``client``: None for one that could not be made."""
        with self._lock:
            if client is not self._client:  # another call has given it up
                return
            self._client = None
            self._retry.failed(time.monotonic())
            if (self._calls.held_s or 0.0) > _REPLACE_S:
                self._replace_threads()
        if client is not None:
            client.close()

    def _replace_threads(self) -> None:
        replaced = [calls for calls in self._replaced if calls.held_s is not None]
        if len(replaced) < _MAX_REPLACED:
            self._replaced, self._calls = [*replaced, self._calls], AbandonableCalls("transfer-queue", _MAX_THREADS)
            log.warning("TransferQueue: %d calls have not ended for over %g s; others get threads of their own",
                        _MAX_THREADS, _REPLACE_S)

    def close(self) -> None:
        with self._lock:
            client, self._client, self._closed = self._client, None, True
        if client is not None:
            client.close()


class RemoteSamples:
    """Samples in queues of other processes, of which one is read at a time: the newest. Thread-safe."""

    def __init__(self, call_s: float) -> None:
        """``call_s``: limit of one read. Imports the package."""
        import_package(call_s)
        self._call_s = call_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def at(self, address: Mapping[str, Any]) -> SamplesAt:
        """``address``: a ``with_attempts``."""
        return SamplesAt(self, address)

    def read(self, address: Mapping[str, Any], refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        """See ``SampleReader.read``. ``address``: a ``with_attempts``. Raises ConfigError for anything else."""
        queue, attempts = without_attempts(address)
        names = {ref: RowName(attempts[ref[0]], *ref) for ref in refs if ref[0] in attempts}
        try:
            found = self._connection_to(queue).run(lambda client: client.get([*names.values()]))
        except (ConfigError, QueueUnavailable):
            raise
        except Exception as e:  # of the package: whatever it raises for an actor that is gone
            raise QueueUnavailable(f"TransferQueue failed: {type(e).__name__}: {e}") from e
        require_none_lost(ref[0] for ref in refs if names.get(ref) not in found)
        return [found[names[ref]] for ref in refs]

    def _connection_to(self, address: Mapping[str, Any]) -> Connection:
        with self._lock:
            before = self._connection
            if before is not None and before.address == address:
                return before
            made = self._connection = Connection(f"elastic-rl-rank-{os.getpid()}", address, self._call_s)
        if before is not None:
            before.close()
        return made


class SamplesAt:
    """Reads samples of the queue at one address. A ``SampleReader``."""

    def __init__(self, samples: RemoteSamples, address: Mapping[str, Any]) -> None:
        self._samples, self.address = samples, address

    def read(self, refs: Sequence[SampleRef]) -> list[tuple[Prompt, Sample]]:
        return self._samples.read(self.address, refs)

    def require(self, refs: Sequence[SampleRef]) -> None:
        """Raises nothing: a rank learns what the queue has lost when it reads it."""
