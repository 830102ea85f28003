"""All checkers of what etcd held and of what clients were told, each with the rule that it proves."""

from __future__ import annotations

from chaos_tests.validate import fencing, groups, histories, lifecycles, versions, watches
from chaos_tests.validate.replay import Checker

CHECKERS: tuple[tuple[str, Checker], ...] = (
    *watches.CHECKERS, *versions.CHECKERS, *fencing.CHECKERS, *lifecycles.CHECKERS, *groups.CHECKERS,
    *histories.CHECKERS)
