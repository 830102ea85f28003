"""The filters: which rewarded groups are dropped in place of being trained on."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from functools import partial

from elastic_rl.config import Config
from elastic_rl.data.samples import FILTER_FAILED, Group
from elastic_rl.errors import PluginFailed
from elastic_rl.pipeline.sampling.fault_isolation import Failure, FaultIsolation, Lane, Verdict
from elastic_rl.pipeline.sampling.reward_calls import GRACE_S, error_text
from elastic_rl.pipeline.sampling.rewarding import Other
from elastic_rl.pipeline.sampling.user_calls import TOO_LONG, UserCalls
from elastic_rl.pipeline.waits import Waits
from elastic_rl.plugins.process import START_S, CallLost
from elastic_rl.plugins.user_code import plain
from elastic_rl.rewards.filters import Filter
from elastic_rl.rewards.own import OwnFilter, close_filter, named_filter, require_reason
from elastic_rl.runtime.abandonable import AbandonableCall

log = logging.getLogger(__name__)

_RETRY_S = (0.1, 2.0)
"""First and longest pause before a group for which a filter failed is tried again."""


class Filters:
    """Asks the filters of ``rollout.filters`` about one group after the other; ``FaultIsolation`` says what becomes of
    those for which one fails. Used by one thread, but for ``take_failed``."""

    def __init__(self, cfg: Config, waits: Waits, *, other: Other) -> None:
        """Waits for the user's code, which may take long to be imported. Raises ConfigError for a setting that names
        nothing, PluginFailed, and Fenced."""
        self._waits, self._calls, self._other = waits, UserCalls(waits), other
        self._limit_s = cfg.rollout.reward_timeout_s
        self._isolation: FaultIsolation[Group] = FaultIsolation.of(cfg, _RETRY_S)
        self._failed: deque[tuple[int, str]] = deque()
        with contextlib.ExitStack() as made:
            self._filters = []
            for entry in cfg.rollout.filters:
                self._filters.append(self._calls.make(
                    f"the filter {plain(str(entry), 200)}", partial(named_filter, entry, self._limit_s),
                    lambda named: close_filter(named[1]), START_S + GRACE_S))
                made.callback(close_filter, self._filters[-1][1])
            self._closing = made.pop_all()

    def close(self) -> None:
        """Ends what the filters have started."""
        self._closing.close()

    def drop_reason(self, group: Group) -> str:
        """The reason of the first filter that drops the group; "" where none does, and for one that has failed before;
        ``FILTER_FAILED`` where one fails for the group, though it works for others. Raises Fenced."""
        if group.failed or not self._filters:
            return ""
        isolation = self._isolation
        isolation.reset()
        isolation.add([group])
        while True:
            for trial in isolation.start(Lane.MAIN, time.monotonic()):
                try:
                    reason = self.attempt(group)
                except PluginFailed as e:
                    [[verdict]] = isolation.settle(Lane.MAIN, [(trial, [Failure.GROUP])], time.monotonic())
                    if verdict is Verdict.DROP:
                        log.warning("group %d is dropped since a filter failed: %s", group.ordinal, e)
                        self._failed.append((group.ordinal, str(e)))
                        return FILTER_FAILED
                    self._waits.waits("plugin", verdict.reason(str(e), "the filter or the prompts' metadata"))
                else:
                    isolation.settle(Lane.MAIN, [(trial, [None])], time.monotonic())
                    self._waits.works()
                    return reason
            if (probe := isolation.probe(Lane.MAIN, self._other_group)) is not None:
                isolation.probed(Lane.MAIN, works=self._works_for(probe))
            self._waits.pause(isolation.left_s(time.monotonic()))

    def take_failed(self) -> dict[int, str]:
        """The groups that were dropped since a filter failed, and why it did, since the last call. Any thread may call
        it."""
        return dict(self._failed.popleft() for _ in range(len(self._failed)))

    def _other_group(self, number: int) -> Group:
        prompt, sample = self._other(number)
        return Group(-1, prompt, (sample.rewarded(0.0, {}),))

    def _works_for(self, group: Group) -> bool:
        with contextlib.suppress(PluginFailed):
            self.attempt(group)
            return True
        return False

    def attempt(self, group: Group) -> str:
        """Asks the filters once. Raises PluginFailed where one fails, and Fenced."""
        for name, drop_reason in self._filters:
            what = f"the filter {name}"
            # One of the user's own is bounded by itself, with the start of its process.
            most_s = START_S + self._limit_s + GRACE_S if isinstance(drop_reason, OwnFilter) else self._limit_s
            asked = self._calls.run(f"{what} for group {group.ordinal}", partial(_ask, drop_reason, group), most_s,
                                    shown_after_s=self._limit_s)
            error = asked.exception()
            if isinstance(error, TimeoutError | CallLost) and isinstance(drop_reason, OwnFilter):
                raise PluginFailed(f"{what} for group {group.ordinal} took longer than {self._limit_s:g} s, or ended "
                                   "its process", hint=TOO_LONG)
            if error is not None:
                raise PluginFailed(f"{what} failed for group {group.ordinal}: {error_text(error)}") from error
            if reason := asked.result():
                return reason
        return ""


def _ask(drop_reason: Filter, group: Group, _: AbandonableCall[str]) -> str:
    return require_reason(drop_reason(group))
