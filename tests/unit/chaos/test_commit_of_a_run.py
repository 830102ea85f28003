"""Which commit the log of a chaos run names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from chaos_tests import provenance


def test_commit_is_of_the_suites_own_checkout_and_of_no_other_around_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path
                                                                        ) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for words in (["config", "user.email", "a@b"], ["config", "user.name", "a"],
                  ["commit", "-q", "--allow-empty", "-m", "m"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    of_own, of_other = tmp_path / "chaos_tests" / "provenance.py", tmp_path / "venv" / "chaos_tests" / "provenance.py"
    for file in (of_own, of_other):
        file.parent.mkdir(parents=True)
    monkeypatch.setattr(provenance, "__file__", str(of_own))
    assert provenance.commit()
    monkeypatch.setattr(provenance, "__file__", str(of_other))
    assert provenance.commit() == ""
