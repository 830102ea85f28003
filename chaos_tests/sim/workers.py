"""Runs simulated worlds in several processes. A process that ends by itself is an error: its runs are nobody's."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from chaos_tests.sim.worlds import Played, play
from elastic_rl.errors import ElasticRLError


class WorkerDied(ElasticRLError):
    """A process that ran worlds has ended, and with it what its runs have found."""


@dataclass(frozen=True)
class Task:
    """Runs of one world that one process makes, one after the other."""

    world: str
    seeds: range
    until_s: float
    """No run begins after this second of the monotonic clock."""

    def played(self) -> Played:
        return play(self.world, self.seeds, until_s=self.until_s)


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    task: Task


def results(tasks: Sequence[Task], jobs: int) -> Generator[tuple[Task, Played], None, None]:
    """The result of each task, in any order. Raises WorkerDied. All processes have ended once the iterator is closed,
    which it is also where its reader fails."""
    if min(jobs, len(tasks)) == 1:
        for task in tasks:
            yield task, task.played()
        return
    left, workers = deque(tasks), dict[Connection, _Worker]()
    try:
        for _ in range(min(jobs, len(tasks))):
            worker = _started(left.popleft())
            workers[worker.pipe] = worker
        while workers:
            for pipe in wait([*workers]):
                assert isinstance(pipe, Connection)
                worker = workers[pipe]
                yield worker.task, _received(worker)
                if left:
                    worker.task = left.popleft()
                    pipe.send(worker.task)
                else:
                    _end(workers.pop(pipe))
    finally:
        for worker in workers.values():
            _end(worker)


def _started(task: Task) -> _Worker:
    # A new interpreter, since this one has threads of the clients of etcd.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    ours.send(task)
    return _Worker(process, ours, task)


def _received(worker: _Worker) -> Played:
    try:
        found = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        world, seeds = worker.task.world, worker.task.seeds
        raise WorkerDied(
            f"a process ended with code {worker.process.exitcode} while it ran world {world} with seeds {seeds[0]} to "
            f"{seeds[-1]}", hint=f"elastic-rl chaos sim --worlds {world} --first {seeds[0]} --seeds {len(seeds)} "
                                 "--jobs 1") from None
    assert isinstance(found, Played)
    return found


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _work(pipe: Connection) -> None:
    """Carries tasks out until the process is ended, or the one that has sent them has."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the first one ends this
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.disable()  # what the product logs in worlds that fail is expected
    try:
        with closing(pipe):
            while True:
                pipe.send(pipe.recv().played())
    except (EOFError, BrokenPipeError):
        return


def _end_with_parent() -> None:
    """Ends this process, also in mid-work, with the one that has sent its tasks, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
