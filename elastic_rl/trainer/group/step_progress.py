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
        self._newest: tuple[int, int] | None = None
        """The last step of RL, and the last supervised one before it; None: not known yet."""
        self.made()

    def made(self) -> bool:
        """Whether the job has made a step, for the first time, since this was asked before, in its supervised phase or
        in RL. A step that is made again after a resume is none. Without etcd the answer is no."""
        try:
            status = readable_one(self._etcd.get(self._keys.job_status()), JobStatus)
        except EtcdUnavailable:
            return False
        found, before = (status.step, status.sft_step) if status is not None else (0, 0), self._newest
        self._newest = max(found, before or found)
        return before is not None and found > before
