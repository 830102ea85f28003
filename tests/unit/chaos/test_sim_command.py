"""``elastic-rl chaos sim``: what it says of many runs, in one process and in several."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import psutil
import pytest
from support.waiting import wait_until

from chaos_tests.sim import command, workers
from chaos_tests.sim.worlds import STEPS, WORLDS, Played, SimWorld, play
from elastic_rl.cli.exit_codes import Exit

FAST = ["steps-sft", "election"]


@dataclass(frozen=True)
class DeadlyTask(workers.Task):
    """Ends its process, as the kernel does where memory is short."""

    def played(self) -> Played:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("is dead")


def _world(seed: int) -> object:
    if seed % 3 == 2:
        raise AssertionError("a rule was broken")
    return SimpleNamespace(counts=Counter({STEPS: 10, "often": 2, "seldom": seed == 1}))


def _said(monkeypatch: pytest.MonkeyPatch, seeds: range, *, never_from: int = 1) -> tuple[int, list[str]]:
    said: list[str] = []
    monkeypatch.setitem(WORLDS, "made-up", SimWorld("", _world, frozenset({"often", "seldom", "impossible"})))
    monkeypatch.setattr(command, "NEVER_FROM", never_from)
    return command.run_worlds(["made-up"], seeds, float("inf"), said.append, coverage=True), said


def test_violation_is_said_with_its_world_its_seed_and_the_command_that_shows_it_alone(
        monkeypatch: pytest.MonkeyPatch) -> None:
    broken, said = _said(monkeypatch, range(4, 10))
    assert broken == 2
    assert "  made-up, seed 5: AssertionError: a rule was broken" in said
    assert "    again: elastic-rl chaos sim --worlds made-up --first 8 --seeds 1" in said
    assert said[-1].startswith("6 seeds (4 to 9), 1 worlds, 6 runs, 40 steps, 2 violations, ")


def test_coverage_has_each_kind_and_says_what_never_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    _, said = _said(monkeypatch, range(6))
    lines = [" ".join(line.split()) for line in said]
    assert [line for line in lines if line in ("impossible NEVER HAPPENED", "seldom 1 in 1 runs", "often 8 in 4 runs")
            ] == ["impossible NEVER HAPPENED", "seldom 1 in 1 runs", "often 8 in 4 runs"]
    _, said = _said(monkeypatch, range(6), never_from=7)
    assert not any("NEVER" in line for line in said), "so few runs say nothing of what is rare"


@pytest.mark.parametrize("name", WORLDS)
def test_world_counts_its_steps_and_kinds(name: str) -> None:
    played = play(name, range(3))
    assert not played.failures and played.counts[STEPS] > 3
    known = {kind for kind, n in played.counts.items() if n} & WORLDS[name].kinds
    assert len(known) > len(WORLDS[name].kinds) / 3, "its kinds have the names that it counts under"


def test_processes_find_what_one_process_finds() -> None:
    tasks = [workers.Task(name, range(n, n + 3), float("inf")) for name in FAST for n in (0, 3)]
    alone = {task: played for task, played in workers.results(tasks, 1)}
    assert {task: played for task, played in workers.results(tasks, 2)} == alone
    assert all(played.runs == 3 and played.counts[STEPS] for played in alone.values())


def test_process_that_dies_is_an_error_and_no_other_one_is_left() -> None:
    tasks = [DeadlyTask("election", range(20, 23), float("inf")), workers.Task("election", range(300), float("inf"))]
    with pytest.raises(workers.WorkerDied, match="code -9 while it ran world election with seeds 20 to 22"):
        list(workers.results(tasks, 2))
    assert not [p for p in psutil.Process().children() if "multiprocessing.spawn" in " ".join(p.cmdline())]


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, Exit.INTERRUPTED), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)])
def test_all_processes_end_with_the_first_one(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "chaos_tests.sim", "--seeds", "1000000", "--worlds", "cluster", "--jobs", "2"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background job ignores it
    try:
        def children() -> list[psutil.Process]:
            return [p for p in psutil.Process(process.pid).children() if "spawn_main" in " ".join(p.cmdline())]

        wait_until(lambda: len(children()) == 2, what="two processes run worlds")
        ended = children()
        process.send_signal(number)  # to the first one alone
        assert process.wait(120) == code
        wait_until(lambda: not any(p.is_running() for p in ended), what="they have ended")
    finally:
        process.kill()
        process.wait()
