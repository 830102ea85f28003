"""Runs the parts of a reconcile pass so that the fault of one does not keep the driver from the others (I11)."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_rl.driver.plan import StartBudget
from elastic_rl.errors import EtcdDenied, EtcdFull, EtcdUnavailable, Fenced

log = logging.getLogger(__name__)

_CEILING_S = 15.0
"""Longest pause before a part that fails is tried again. Short, since a pass of a part is cheap."""
_REPORT_EVERY_S = 60.0
"""A part that fails and works in turn is reported at most this often."""
_MAX_TEXT = 300


@dataclass
class _Part:
    budget: StartBudget = field(default_factory=lambda: StartBudget(ceiling_s=_CEILING_S))
    error: str = ""
    reported_at: float = float("-inf")
    reported: bool = False
    """Whether the end of the fault is to be reported too."""


class PartRunner:
    """Isolates the parts of a pass from one another.

    A part that raises is tried again in later passes, with backoff and without end. ``faults`` holds what is wrong now;
    ``report(part, message, failed)`` is called when a fault begins and when it is over.
    """

    def __init__(self, report: Callable[[str, str, bool], None], *, clock: Callable[[], float] = time.monotonic,
                 jitter: Callable[[], float] = random.random) -> None:
        self._report, self._clock, self._jitter = report, clock, jitter
        self._parts: dict[str, _Part] = {}

    @property
    def faults(self) -> dict[str, str]:
        """The error of each part that failed when it was last tried."""
        return {name: part.error for name, part in self._parts.items() if part.error}

    def run(self, name: str, step: Callable[[], None]) -> None:
        """One pass of a part, unless it waits for its next attempt. Raises Fenced, which ends the driver, and
        EtcdUnavailable while etcd does not answer: no part can be reconciled then, and none has failed."""
        part = self._parts.setdefault(name, _Part())
        if not part.budget.open(self._clock()):
            return
        try:
            step()
        except Fenced:
            raise
        except (EtcdFull, EtcdDenied) as e:  # reads may work, so the other parts can do something
            self._failed(name, part, e)
        except EtcdUnavailable:
            raise
        except Exception as e:  # whatever it is: only this part waits for it
            self._failed(name, part, e)
        else:
            self.note(name, "")

    def note(self, name: str, fault: str) -> None:
        """Records the state of a part that runs in a thread of its own: its fault, or nothing when it works."""
        part = self._parts.setdefault(name, _Part())
        if fault:
            self._set(name, part, fault[:_MAX_TEXT])
        else:
            self._works(name, part)

    def _failed(self, name: str, part: _Part, error: Exception) -> None:
        part.budget = part.budget.after_failure(self._clock(), jitter=self._jitter())
        self._set(name, part, f"{type(error).__name__}: {error}"[:_MAX_TEXT], error)

    def _set(self, name: str, part: _Part, text: str, error: Exception | None = None) -> None:
        if text == part.error:
            return
        log.warning("part %s of the compute plane fails: %s", name, text, exc_info=error)
        part.error = text
        now = self._clock()
        if not part.reported and now - part.reported_at >= _REPORT_EVERY_S:
            part.reported_at, part.reported = now, True
            self._report(name, text, True)

    def _works(self, name: str, part: _Part) -> None:
        if not part.error:
            return
        log.info("part %s of the compute plane works again", name)
        part.error = ""
        if part.reported:
            part.reported = False
            self._report(name, "works again", False)
