"""The stop of a run on record, written in the place of the run's actor, which has ended without it or gets no time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from elastic_rl.errors import Conflict
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import ENDED_PHASES, WORKING_PHASES, Epoch, JobStatus, ended, stopped_message
from elastic_rl.etcd.transaction import Compare, Op

log = logging.getLogger(__name__)
_TRIES = 32
"""Tries to write the stop between two writes of the actor's, before it counts as a conflict."""


def put_stop(writer: FencedWriter, keys: Keys,
             check: Callable[[int, Epoch | None], None] = lambda number, epoch: None) -> str:
    """Writes that the run was stopped, unless an end of it is on record. One transaction has the status of the job, the
    event, and the end of the actor's term, since the actor would else write that it works. It is conditional on all
    that it was decided by: what is stopped is the epoch that was read, and no later one.

    ``writer``: under the token of who may stop the run. ``check``: called with the number and the record of the epoch
    that was read; raises Fenced where the caller may not stop that one. Returns the phase on record then. Raises
    Fenced, Conflict and EtcdUnavailable.
    """
    read = keys.job_status(), keys.epoch(), keys.actor_term()
    for _ in range(_TRIES):
        found = writer.txn([], [Op.get(key) for key in read])
        kv, epoch, term = (found.get(key) for key in read)
        status = readable_one(kv, JobStatus) or JobStatus(phase="")
        if status.phase in ENDED_PHASES:
            return status.phase
        number = epoch.version if epoch else 0
        check(number, readable_one(epoch, Epoch))
        fence, end_term = fencing.next_term(keys, term.version if term else 0, "stop")
        message = stopped_message(status, committed=status.phase not in WORKING_PHASES)
        if writer.emit(event_kinds.RUN_STOPPED, keys.job, message, compares=[
                fencing.epoch_guard(keys, number), fence,
                Compare.mod(keys.job_status(), "==", kv.mod_revision if kv else 0)], ops=[
                    end_term, Op.put(keys.job_status(), ended(status, "stopped", message, time.time()).encode())]):
            log.warning("the run was %s", message)
            return "stopped"
    raise Conflict(f"{keys.job_status()} was changed concurrently in each of {_TRIES} tries")
