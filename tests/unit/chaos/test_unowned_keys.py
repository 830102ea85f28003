"""Which keys of a job that has ended have an owner no more (I8)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from chaos_tests.target import Target
from elastic_rl.etcd.keys import Keys

KEYS = Keys("j")


def unowned(*found: str) -> list[str]:
    reader = SimpleNamespace(range=lambda prefix: (
        [SimpleNamespace(key=key) for key in found if key.startswith(prefix)], 1))
    return Target.unowned(cast(Any, SimpleNamespace(keys=KEYS, reader=reader)))


def test_what_processes_of_the_job_hold_is_to_go_with_them() -> None:
    held = [KEYS.member("engine", "e-1"), KEYS.process("m", "trainer", "rank-0"), KEYS.pin("policy", 3, "e-1"),
            KEYS.staging_owner("policy", 4), f"{KEYS.rendezvous_prefix()}trainer-1-1/a"]
    assert unowned(*held) == held


def test_what_runs_on_keeps_what_it_has() -> None:
    kept = [KEYS.member("coordinator", "coordinator-0"), KEYS.process("m", "coordinator", "coordinator-0"),
            KEYS.process("m", "dcs", "node-0"), KEYS.version("policy", 3), KEYS.job_status(),
            KEYS.group_lease("actor")]  # of prompt groups, which a resume goes by
    assert unowned(*kept) == []
