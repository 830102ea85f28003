"""Clients of the admin API of a job that trains: through each replica one of them reads and changes what operators do,
seldom enough that the job has its cores."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from chaos_tests.event_log import EventLog
from chaos_tests.model.host_spec import CORDONED, USED
from chaos_tests.model.operation import ABSENT, FINAL
from chaos_tests.traffic.cluster_changes import ApiTarget, ClusterCalls
from chaos_tests.traffic.traffic import Traffic

_SILENCE_S = 86400.0
_NO_ALERT = "chaos.none"
"""A kind that no alert has: silences of it hold back nothing."""
_TRIES = 6
"""Most times that a request is sent whose outcome is not known."""
_READINGS = 600
"""Most readings of an operation that goes on: a pool that lost its engine may need minutes."""


class JobClients(Traffic):
    """One client a replica."""

    def __init__(self, target: ApiTarget, seed: int, *, pause_s: float, log: EventLog | None = None) -> None:
        """``pause_s``: between what a client does, about."""
        super().__init__(log=log)
        self.calls, self._seed, self._pause_s = ClusterCalls(target, self.recorder), seed, pause_s

    def workers(self) -> Sequence[Callable[[], None]]:
        return [partial(self._work, replica, random.Random(f"{self._seed} {type(self).__name__} {replica}"))
                for replica in self.calls.target.urls]

    def _work(self, replica: str, choose: random.Random) -> None:
        while not self.pause(self._pause_s * 2 * choose.random()):
            if self.act(replica, choose):
                self.count()

    @abstractmethod
    def act(self, replica: str, choose: random.Random) -> bool:
        """Does one thing; returns whether it was done."""

    def other(self, replica: str, choose: random.Random) -> str:
        """Another replica, where there is one."""
        return choose.choice([name for name in self.calls.target.urls if name != replica] or [replica])

    def carry_out(self, replica: str, choose: random.Random, path: str, body: dict[str, object] | None, *,
                  method: str = "POST", key: str = "") -> tuple[str, str]:
        """Begins an operation, sending the request twice, and reads it until it has ended. Returns its id and the state
        that was read last, "" where they are not known. ``path``: below that of the job; ``key``: of the request."""
        key, begun, state = key or self.new_key(choose), "", ""
        for _ in range(_TRIES):
            begun = self.calls.create(replica, path, body, key, replica, method=method)
            if begun or self.pause(1.0):
                break
        if not begun:
            return "", ""
        self.calls.create(self.other(replica, choose), path, body, key, replica, method=method)
        for _ in range(_READINGS):
            state = self.calls.state(choose.choice([*self.calls.target.urls]), begun, key, replica)
            if state in FINAL or state == ABSENT or self.pause(1.0):
                break
        return begun, state

    def new_key(self, choose: random.Random) -> str:
        return f"{self._seed}-{choose.getrandbits(64):x}"


class PoolSizeClients(JobClients):
    """Read and write the desired number of the pool."""

    def __init__(self, target: ApiTarget, seed: int, sizes: Sequence[int], *, writes: float = 0.2, pause_s: float = 1.0,
                 log: EventLog | None = None) -> None:
        """``sizes``: those that are written; where it is the one that is there, nothing changes. ``writes``: their
        share."""
        super().__init__(target, seed, pause_s=pause_s, log=log)
        self._sizes, self._writes = sizes, writes

    def act(self, replica: str, choose: random.Random) -> bool:
        url = self.calls.job_url(replica)
        if choose.random() < self._writes:
            return self.calls.pool.patch(url, choose.choice(self._sizes), client=replica).status == 200
        return self.calls.pool.read(url, client=replica)


class HostSpecs(JobClients):
    """Read and change whether hosts are used: mostly they are, so that there is one for what is to run. At the end each
    is."""

    def __init__(self, target: ApiTarget, seed: int, *, pause_s: float = 2.0, log: EventLog | None = None) -> None:
        super().__init__(target, seed, pause_s=pause_s, log=log)

    def act(self, replica: str, choose: random.Random) -> bool:
        host = choose.choice([*self.calls.target.hosts])
        if choose.random() < 0.5:
            return self.calls.wanted(replica, host, replica)
        return self.calls.want(replica, host, choose.choices((USED, CORDONED), (2, 1))[0], replica)

    def close(self) -> None:
        self.stop()
        for host in self.calls.target.hosts:
            for _ in range(_TRIES):
                if any(self.calls.want(replica, host, USED, "last") for replica in self.calls.target.urls):
                    break
        super().close()


class Silences(JobClients):
    """Silence alerts that there are not, sending each request twice, look for the silence, and end it."""

    def __init__(self, target: ApiTarget, seed: int, *, pause_s: float = 4.0, log: EventLog | None = None) -> None:
        super().__init__(target, seed, pause_s=pause_s, log=log)

    def act(self, replica: str, choose: random.Random) -> bool:
        key, silence = self.new_key(choose), ""
        for _ in range(_TRIES):
            silence = self.calls.silence(replica, _NO_ALERT, _SILENCE_S, key, replica)
            if silence or self.pause(1.0):
                break
        if not silence:
            return False
        other = self.other(replica, choose)
        self.calls.silence(other, _NO_ALERT, _SILENCE_S, key, replica)
        self.calls.silenced(other, silence, key, replica)
        for _ in range(_TRIES):
            if self.calls.end_silence(other, silence, key, replica) or self.pause(1.0):
                break
        self.calls.silenced(replica, silence, key, replica)
        return True


class Requests(JobClients):
    """Begin operations, sending each request twice, and read each until it has ended."""

    def __init__(self, target: ApiTarget, seed: int, path: str, what: dict[str, object], *, pause_s: float = 8.0,
                 log: EventLog | None = None) -> None:
        """``path``: below that of the job; ``{engine}`` in it stands for one that is ready. ``what``: body of the
        request."""
        super().__init__(target, seed, pause_s=pause_s, log=log)
        self._path, self._what = path, what

    def act(self, replica: str, choose: random.Random) -> bool:
        path = self._path
        if "{engine}" in path:
            if not (engine := self.calls.ready_engine(replica)):
                return False
            path = path.format(engine=engine)
        return bool(self.carry_out(replica, choose, path, self._what)[0])
