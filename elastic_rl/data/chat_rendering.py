"""Renders conversations by the chat template of a model, in a process with limits on time and memory.

A chat template comes with a model, so it is a program of strangers: one with a loop that has no end would stop the
process that renders it, and one that makes ever longer texts would take the memory of the machine.
"""

from __future__ import annotations

import datetime
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_rl.errors import ConfigError
from elastic_rl.plugins.worker_pool import CallGivenUp, WorkerPool

log = logging.getLogger(__name__)

Conversation = tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]
"""The messages of a conversation, and further variables of the template: JSON values."""
NOW = "strftime_now"
"""The function by which a chat template writes the date, as those of Llama 3.2 and Granite do."""
MAX_CHARACTERS = 16 << 20
"""Characters of one rendered conversation, at most."""
_PROCESSES = 2
"""One more than most callers use at once: a conversation that hangs does not hold up all others."""
_LIMIT_S = 30.0
"""Seconds for one call."""
_MEMORY_MB = 1024
"""Address space of the process, of which 200 MiB are its imports."""
_BATCH = 256
"""Conversations of one call at most. All of them together have the limit of one, which they reach only if something is
wrong: an ordinary one takes less than a millisecond."""
_DOWNLOAD = "correct the template, or download the model again"


class ChatRenderer:
    """Renders conversations in worker processes, which start when they are needed and end with this object, or with
    this process. Thread-safe; threads take turns when all processes are busy."""

    def __init__(self, now: datetime.datetime) -> None:
        """``now``: what templates read of the clock."""
        self._now = now.isoformat()
        self._pool = WorkerPool("elastic_rl.data.template_worker:render", _PROCESSES, memory_mb=_MEMORY_MB,
                                named="the chat template")
        weakref.finalize(self, self._pool.close)

    def render(self, template: str, source: str, variables: Mapping[str, Any],
               conversations: Sequence[Conversation]) -> list[str]:
        """The texts of conversations. ``source``: the template's file, for errors. ``variables``: of the template, for
        all of them.

        Raises ConfigError for a template that is none, refuses messages, or passes a limit; PluginFailed when no worker
        can be started."""
        texts = list[str]()
        for first in range(0, len(conversations), _BATCH):
            texts += self._batch(template, source, variables, conversations[first:first + _BATCH])
        return texts

    def _batch(self, template: str, source: str, variables: Mapping[str, Any],
               conversations: Sequence[Conversation]) -> list[str]:
        job = {"template": template, "variables": dict(variables), "now": self._now, "conversations": conversations}
        try:
            answers = self._answers(job)
        except CallGivenUp as e:
            raise ConfigError(
                f"the chat template in {source} did not render a conversation within {_LIMIT_S:g} s and "
                f"{_MEMORY_MB} MiB, twice, and its process was ended", hint="look in it for a loop without an end and "
                f"for texts that grow without one, and {_DOWNLOAD}") from e
        failed = answers[-1]
        if "syntax" in failed:
            raise ConfigError(f"the chat template in {source} is no valid Jinja, line {failed['line']}: "
                              f"{failed['syntax']}", hint=_DOWNLOAD)
        if "refused" in failed:
            raise ConfigError(f"the chat template in {source} refuses the messages: {failed['refused']}",
                              hint="check roles and their order, data.options.system_prompt and "
                              "data.options.chat_template_options")
        return [str(answer["text"]) for answer in answers]

    def _answers(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Raises CallGivenUp once the second process has failed too: one may be killed, or halted for a while, through
        no fault of the template."""
        try:
            return list(self._pool.call_and_wait(job, _LIMIT_S))
        except CallGivenUp as e:
            log.warning("%s; the conversations are rendered once more", e.message)
            return list(self._pool.call_and_wait(job, _LIMIT_S))
