"""Programs beside a job that publish and pull a stream of their own on its checkpoint service, by the interface that
any program may use (``elastic_rl.dcs``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from chaos_tests.event_log import EventLog
from chaos_tests.history import Recorder, Unanswered
from chaos_tests.model.models import STREAM
from chaos_tests.model.number import READ, WRITE
from chaos_tests.streams import OF_PROGRAMS
from chaos_tests.traffic.dcs import content, is_whole
from chaos_tests.traffic.traffic import Traffic, call
from elastic_rl import dcs
from elastic_rl.dcs.service_access import ServiceAccess
from elastic_rl.errors import ElasticRLError, Fenced, VersionNotFound

Act = Callable[[dcs.CheckpointService, str], None]
"""What a program does again and again, by its name."""
TORN = -1
"""Stands for the seed of tensors that are those of no seed: no version was published as that."""
CONNECT = "connect"
"""A call that no history has: one that was served says nothing of a stream."""


class StreamPrograms(Traffic):
    """One publishes, and two pull the head. What a version has follows from the seed in its record. To the model of a
    stream, which is that of a number with a revision, a publish writes the seed and a pull reads it; the number of the
    version is the revision, and both are 0 where there is no version. A program that is fenced, as by a driver that
    takes over, ends and is started again, and so is one that cannot begin."""

    def __init__(self, access: Callable[[], ServiceAccess], *, pause_s: float = 2.0, log: EventLog | None = None,
                 recorder: Recorder | None = None) -> None:
        """``access``: asked each time that a program begins. ``pause_s``: between what a program does."""
        super().__init__(log=log, recorder=recorder)
        self._access, self._pause_s, self._seeds = access, pause_s, itertools.count(1)

    def workers(self) -> Sequence[Callable[[], None]]:
        return [partial(self._program, self._publish, "publisher"),
                *(partial(self._program, self._pull, f"puller-{n}") for n in range(2))]

    def _program(self, act: Act, name: str) -> None:
        while not self.pause(self._pause_s):
            with suppress(ElasticRLError), ExitStack() as connection:
                service = self._connect(name, connection)
                while not self.pause(self._pause_s):
                    self._try(act, service, name)

    def _connect(self, name: str, connection: ExitStack) -> dcs.CheckpointService:
        try:
            return connection.enter_context(dcs.connect(self._access()))
        except ElasticRLError:
            with self.recorder.operation(name, OF_PROGRAMS, CONNECT, model=STREAM):
                raise Unanswered from None
            raise

    def _try(self, act: Act, service: dcs.CheckpointService, name: str) -> None:
        try:
            act(service, name)
        except Fenced:
            raise
        except ElasticRLError:
            return
        self.count()

    def _publish(self, service: dcs.CheckpointService, name: str) -> None:
        seed = next(self._seeds)
        with call(self.recorder, name, OF_PROGRAMS, WRITE, seed, model=STREAM) as answer:
            answer.is_((seed, service.publish(OF_PROGRAMS, content(seed), meta={"seed": seed}).number))

    def _pull(self, service: dcs.CheckpointService, name: str) -> None:
        with call(self.recorder, name, OF_PROGRAMS, READ, model=STREAM) as answer:
            try:
                pulled = service.pull(OF_PROGRAMS)
            except VersionNotFound:
                answer.is_((0, 0))
                return
            seed = int(pulled.version.meta["seed"])
            answer.is_((seed if is_whole(seed, pulled.tensors) else TORN, pulled.version.number))
