"""Files that parts of the compute plane leave on a host when they are killed, which the driver has removed there."""

from __future__ import annotations

import logging

from elastic_rl.driver.placement import run_on_hosts
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.here import context_here
from elastic_rl.host.leftovers import remove_files
from elastic_rl.host.paths import JobPaths

log = logging.getLogger(__name__)


def remove_files_of(ctx: RunContext, *parts: tuple[str, str]) -> None:
    """Removes the files of parts that have run on this host, and have ended. ``parts``: as ``JobPaths.file_tag`` has
    them: the name, and one start of it or, where that is empty, all."""
    paths = JobPaths.of(context_here(ctx).config)
    for part, start in parts:
        remove_files(paths.file_tag(part, start))


class LeftFiles:
    """The files of parts that have ended: on this host they are removed at once, on others with the next ``remove``."""

    def __init__(self, ctx: RunContext) -> None:
        self._ctx = ctx
        self._elsewhere: dict[str, list[tuple[str, str]]] = {}
        """Parts that have ended on other hosts, by the host's address."""

    def note(self, part: str, host: str, start: str = "") -> None:
        """A part has ended. ``host``: its address; empty: this one, as for a part that had not said it. ``start``: the
        one that has ended, of a part that may start on another host before its files are removed."""
        if host in ("", self._ctx.host):
            remove_files_of(self._ctx, (part, ""))
        else:
            self._elsewhere.setdefault(host, []).append((part, start))

    def remove(self) -> None:
        """Removes what is noted, on the hosts that are there: the worker of one that is gone does it when it starts
        again."""
        left, self._elsewhere = self._elsewhere, {}
        if left:
            try:
                run_on_hosts(remove_files_of, {host: (self._ctx, *parts) for host, parts in left.items()})
            except Exception:  # whatever Ray raises: nothing waits for it
                log.exception("files of what has ended are not removed on other hosts")
