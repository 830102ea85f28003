"""Versions of weights that the trainer went back from stay abandoned."""

from __future__ import annotations

from elastic_rl.data import branch
from elastic_rl.data.branch import Branch


def test_the_last_returns_are_remembered_however_many_there_were() -> None:
    now, version = Branch().published(1), 1
    for _ in range(branch._KEPT + 5):
        now, version = now.restored(version).published(version + 3), version + 3  # two versions are abandoned
    assert len(now.abandoning) <= branch._KEPT + 1
    assert now.abandoned([version - 1]) and now.abandoned([version - 3 * branch._KEPT + 1]), "the newest are kept"
    assert not now.abandoned([version]) and not now.abandoned([version - 3]), "its weights were gone on from"
    assert Branch.from_json(now.to_json()) == now
