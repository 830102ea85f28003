"""A part of a version is on as many nodes as are different ones, and each part counts by itself."""

from __future__ import annotations

from support.chaos_log import KEYS, Log, edited

from chaos_tests.validate.judge import broken
from chaos_tests.validate.versions import Commits, KeptVersions


def commits(*parts: list[str], replicas: int = 2) -> list[str]:
    """What is said of a version that was committed with its parts on these nodes."""
    log = Log(steps=1, faults=False)
    log.records[0]["settings"]["dcs"] = {"replicas": replicas}
    log.put((KEYS.dcs_node("node-1"), {"id": "node-1"}))
    log.version(9, 2)
    edited(log.records, KEYS.replica_sets("policy", 9), lambda value: value.update(parts=[*parts]))
    found = broken(log.records, [Commits])
    return [violation.what.partition("committed ")[2] for violation in found
            if f"{KEYS.version('policy', 9)} " in violation.what]


def test_node_that_a_part_names_twice_has_one_copy_of_it() -> None:
    assert commits(["node-0", "node-1"]) == []
    assert commits(["node-0", "node-0"]) == ["although a part is on 1 of 2 nodes"]
    assert commits(["node-0", "node-0"], replicas=1) == []


def test_short_part_beside_a_whole_one_is_too_few() -> None:
    for parts in ([["node-0", "node-1"], ["node-0"]], [["node-1"], ["node-0", "node-1"]]):
        assert commits(*parts) == ["although a part is on 1 of 2 nodes"]
    assert commits(["node-0", "node-1"], ["node-1", "node-0"]) == []


def lost(*parts: list[str], gone: str) -> list[str]:
    """What is said of a version with its parts on these nodes, of which one fails for good."""
    log = Log(steps=1, faults=False)
    del log.records[-1]
    log.put((KEYS.dcs_node("node-1"), {"id": "node-1"}))
    log.put((KEYS.job_status(), {"phase": "rl", "step": 1}))
    log.version(9, 2)
    edited(log.records, KEYS.replica_sets("policy", 9), lambda value: value.update(parts=[*parts]))
    log.put((KEYS.dcs_node(gone), None))
    log.at += 100.0
    log.status("rl", 2)
    return [violation.what for violation in broken(log.records, [KeptVersions]) if "version 9 " in violation.what]


def test_one_failure_of_a_node_that_a_part_names_twice_is_no_loss_beside_the_rule() -> None:
    """With one copy of it, one failure is as many as hold the part."""
    assert lost(["node-1", "node-1"], gone="node-1") == []
    assert lost(["node-1", "node-0"], gone="node-1") == []
