"""The folder of the results of a run: what may be in it, its schedule, and what is made of its log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chaos_tests import abort, report
from chaos_tests.event_log import Records
from chaos_tests.faults.catalogue import FAULTS
from chaos_tests.nemesis.schedule import Schedule
from chaos_tests.report import BASELINE, EVENTS, Judged
from chaos_tests.validate.verdict import RUN, State
from elastic_rl.config import secrets
from elastic_rl.errors import ConfigError
from elastic_rl.runtime.files import read_limited, replace_file

SCHEDULE = "schedule.json"
_BEFORE_A_RUN = (abort.ABORT_FILE, abort.LOCK_FILE, SCHEDULE)
"""What may be in the folder of a run before it begins."""
_MOST_BYTES = 16 << 20
"""Largest file of a schedule that is read: somebody may have sent it."""


@dataclass(frozen=True)
class Outcome:
    """What is wrong with a run that has ended."""

    folder: Path
    wrong: Sequence[str]
    aborted: str = ""
    """Why it was ended early."""
    kept: Sequence[str] = ()
    """Rules that were kept, by their numbers."""
    unseen: Sequence[str] = ()
    """Rules that the log has no evidence for: they were neither kept nor violated."""

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.aborted)

    @property
    def broken(self) -> frozenset[str]:
        """The rules that were violated, by their numbers; ``RUN`` where the run is worth nothing, and broke no other.
        """
        found = frozenset(what.partition(":")[0] for what in self.wrong)
        return found - {RUN} or found


def schedule_at(path: Path) -> Schedule:
    """The schedule of a folder of results, or in a file. Raises ConfigError."""
    file = path
    try:
        file = path / SCHEDULE if path.is_dir() else path
        return Schedule.from_json(read_limited(file, _MOST_BYTES).decode("utf-8-sig"), FAULTS)
    except (OSError, ValueError) as e:
        raise ConfigError(f"no schedule can be read from {file}: {e}",
                          hint="name a folder that `elastic-rl chaos run` has written, or its schedule.json") from e


def require_new(folder: Path) -> None:
    """Raises ConfigError for a folder that has results, or anything else that is no run's, and as
    ``abort.require_private``."""
    if (folder / EVENTS).exists() or (folder / BASELINE).exists():
        raise ConfigError(f"{folder} has the results of a run", hint="name another folder with --out")
    if folder.exists():
        abort.require_private(folder)
    if folder.is_dir() and (others := [path.name for path in folder.iterdir() if path.name not in _BEFORE_A_RUN]):
        raise ConfigError(f"{folder} is not empty: it has {min(others)}", hint="name a new folder with --out")


def is_of(folder: Path, schedule: Schedule) -> bool:
    """Whether the log in a folder is of a run of this schedule. Raises ValueError for a file that is no log."""
    run = next(iter(Records(folder / EVENTS)))
    return bool(run.get("schedule") == json.loads(shown(schedule).to_json()))


def shown(schedule: Schedule) -> Schedule:
    """The schedule as it is kept: others read the folder of a run. Secrets among its settings are to be given again."""
    return replace(schedule, settings=tuple(map(secrets.redacted_setting, schedule.settings)))


def prepare(schedule: Schedule, folder: Path) -> None:
    """Writes what a run begins with into its folder, in which no other one runs. Raises as ``require_new``."""
    require_new(folder)
    replace_file(folder / SCHEDULE, shown(schedule).to_json(), private=True)


def outcome_of(folder: Path) -> Outcome:
    """The outcome of the run whose results are in a folder, by its log and its baseline alone. Raises ValueError for a
    file that is no log."""
    return _outcome(folder, report.read(folder))


def reported(folder: Path) -> Outcome:
    """The outcome of a run, whose report is written into its folder."""
    return _outcome(folder, report.write(folder))


def _outcome(folder: Path, judged: Judged) -> Outcome:
    wrong = [str(violation) for verdict in judged.verdicts for violation in verdict.violations]
    kept, unseen = ([verdict.rule for verdict in judged.verdicts if verdict.state is state]
                    for state in (State.KEPT, State.UNSEEN))
    return Outcome(folder, wrong, str((judged.run.end or {}).get("aborted") or ""), kept, unseen)
