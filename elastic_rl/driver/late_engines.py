"""Which engines do not do what a phase of the devices asks of them (``etcd.device_phase``). Pure."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_rl.etcd.device_phase import SeenPhase, Side
from elastic_rl.etcd.records import Engine, EngineState


class LateEngines:
    """Finds late engines of one pool. An engine that hangs would keep the trainer, or with a request for it the
    engines, waiting for ever; so it is replaced."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[tuple[str, Side, int, int], float] = {}

    def observe(self, phase: SeenPhase, engines: Iterable[Engine], now: float) -> dict[str, str]:
        """Engines that are late, and what they have not done. ``now``: monotonic seconds. Each phase has its limit,
        also where those in between were not seen.

        An engine that is starting is not late: it has device memory, and cannot release it before its server is up.
        Ended for it, it would never be up where a start takes longer than a phase. Its start has limits of its own.

        One that applies a version cannot follow before that is done, which has a limit too: its time begins again then.
        A phase that begins while all of them load the same version would end them all otherwise.
        """
        late, side = dict[str, str](), phase.side
        since: dict[tuple[str, Side, int, int], float] = {}
        for engine in engines:
            if side is None or not self._owes(side, engine):
                continue
            doing = engine.id, side, phase.number, engine.applying
            began = since[doing] = self._since.get(doing, now)
            if now - began >= self._limit_s:
                what = ("release its memory in the trainer's phase" if side is Side.TRAINER
                        else "take device memory in the engines' phase")
                late[engine.id] = f"it did not {what} within {self._limit_s:g} s"
        self._since = since
        return late

    @staticmethod
    def _owes(side: Side, engine: Engine) -> bool:
        if engine.state.ended or engine.state is EngineState.STARTING:
            return False
        return engine.holds_device if side is Side.TRAINER else engine.state is EngineState.RELEASED
