"""Whether a job makes steps while the ranks of a group fail, for the agent that counts the failures."""

from __future__ import annotations

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus


class StepProgress:
    """The steps of a job, by its status."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._phase, self._step = "", 0
        self.made()

    def made(self) -> bool:
        """Whether the job has made a step, for the first time, since this was asked before. A step that is made again
        after a resume is none. Without etcd the answer is no."""
        try:
            status = readable_one(self._etcd.get(self._keys.job_status()), JobStatus)
        except EtcdUnavailable:
            return False
        if status is None or (status.phase == self._phase and status.step <= self._step):
            return False
        self._phase, self._step = status.phase, status.step
        return True
