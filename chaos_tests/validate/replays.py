"""All replay checkers of what etcd held, each with the rule that it proves."""

from __future__ import annotations

from chaos_tests.validate import fencing, groups, lifecycles, versions, watches
from chaos_tests.validate.replay import Checker

CHECKERS: tuple[tuple[str, Checker], ...] = (
    *watches.CHECKERS, *versions.CHECKERS, *fencing.CHECKERS, *lifecycles.CHECKERS, *groups.CHECKERS)
