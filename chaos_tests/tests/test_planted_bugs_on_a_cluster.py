"""Bugs that are planted into the DCS node of a real cluster: the run of a light job there has to break the rule of the
bug, by what its own clients, its observer and its last look at the disk find. (``chaos selftest`` plants into the
simulated worlds, of which none has processes, disks or clients.)"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from light_runs import SETTINGS, goes_on, in_place_of_the_driver, records
from support.tiers import parametrize

from chaos_tests import runner
from chaos_tests.event_log import Kind
from chaos_tests.model.models import STREAM
from chaos_tests.model.number import READ, WRITE
from chaos_tests.nemesis.schedule import Schedule, Strike
from chaos_tests.scenarios import SCENARIOS

pytestmark = pytest.mark.timeout(600)
STEPS = 10


@dataclass(frozen=True)
class Bug:
    what: str
    rule: str
    plant: str
    """What the interpreter of a DCS node executes when it starts."""
    says: str
    """Part of what the run has to say of it."""


BUGS = (
    Bug("a node answers for good with the first head that it has seen", "I3", """
    from elastic_rl.dcs.node.pins import NodePins
    head, first = NodePins.head, {}
    NodePins.head = lambda self, stream: first.setdefault(stream, head(self, stream))
""", "chaos"),
    Bug("a node never ends a pin", "I8", """
    from elastic_rl.dcs.node.pins import NodePins
    NodePins.unpin = lambda self, pin: None
""", "dcs/pins/chaos/"),
    Bug("a node that is stopped deletes its chunks", "I15", """
    from elastic_rl.dcs.storage.disk import DiskFolder
    close = DiskFolder.close
    def delete(self):
        for path in self.folder.glob("??/*"):
            path.unlink()
        close(self)
    DiskFolder.close = delete
""", "chunks"),
)


@parametrize("bug", BUGS, proved_in="chaos_tests/tests/test_runner_with_light_job.py", ids=lambda bug: bug.rule,
             why="another rule, by the same way into a process")
def test_run_breaks_the_rule_of_a_bug_in_a_process_of_its_cluster(bug: Bug, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    go, folder = in_place_of_the_driver(tmp_path, monkeypatch), tmp_path / "results"
    with (tmp_path / "site" / "sitecustomize.py").open("a", encoding="utf-8") as site:
        site.write(f'\nif "elastic_rl.dcs.node.service" in sys.orig_argv:{bug.plant}')
    said = list[str]()

    def pulled_after_two_publishes() -> bool:
        calls = [event["call"] for event in records(folder, Kind.OPERATION)
                 if event["model"] == STREAM and event["ended_s"] is not None]
        of_publishes = [n for n, call in enumerate(calls) if call == WRITE]
        # Of each of the two programs that pull, the second answer is to a pull that has begun since.
        return len(of_publishes) > 1 and calls[of_publishes[1]:].count(READ) > 3

    goes_on(go, folder, said, SCENARIOS["quick"], pulled_after_two_publishes)
    runner.run(Schedule(1, STEPS, (Strike(3, ("coordinator_killed",)),), scenario="quick", settings=SETTINGS), folder,
               say=said.append)
    verdicts = {v["rule"]: v for v in json.loads((folder / "report.json").read_text(encoding="utf-8"))["verdicts"]}
    found = [violation for violation in verdicts[bug.rule]["violations"] if bug.says in str(violation)]
    assert found, {rule: v["violations"] for rule, v in verdicts.items() if v["violations"]}
