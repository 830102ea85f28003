"""What a host is registered with: its incarnation, which lasts for a boot, and what it has for work."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_rl.host.agent import host_facts
from elastic_rl.host.agent.host_facts import HostResources, host_record, kept_incarnation
from elastic_rl.host.local_host import LocalHost


def test_incarnation_is_kept_for_one_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "incarnation"
    monkeypatch.setattr(host_facts, "machine_id", lambda: "boot-1")
    first = kept_incarnation(file)
    assert first and kept_incarnation(file) == first
    monkeypatch.setattr(host_facts, "machine_id", lambda: "boot-2")
    second = kept_incarnation(file)
    assert second != first and kept_incarnation(file) == second


def test_incarnation_without_a_known_boot_or_with_a_damaged_file_is_a_new_one(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "incarnation"
    file.write_text("{")
    assert kept_incarnation(file) == kept_incarnation(file)
    monkeypatch.setattr(host_facts, "machine_id", lambda: "")
    assert kept_incarnation(file) != kept_incarnation(file)


def test_gpus_are_those_that_have_a_device_file(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert HostResources.of_this_host(tmp_path).gpus == 2


def test_host_record_has_the_resources_of_this_host() -> None:
    record = host_record(LocalHost(name="h", address="10.0.0.7", labels={"zone": "a"}), "i")
    assert (record.id, record.incarnation, record.address, record.labels) == ("h", "i", "10.0.0.7", {"zone": "a"})
    assert record.cpus > 0 and record.memory_bytes > 0 and record.shm_bytes > 0
