"""The units in ops/systemd: the commands that they call, and what lets services outlive a command that is killed."""

from __future__ import annotations

import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
from support.launchers import ENDS_S, OPS, options_of, seconds, words_of

UNITS = {name: OPS / "systemd" / f"elastic-rl-{name}@.service" for name in ("cluster", "node")}
PROGRAM = "/opt/elastic-rl/.venv/bin/elastic-rl"

units = pytest.mark.parametrize("name", UNITS)


def section(name: str, of: str = "Service") -> dict[str, str]:
    """The settings of a section; none may be there twice."""
    parser = ConfigParser(delimiters="=", interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS[name])
    return dict(parser[of])


def test_units_call_commands_that_exist() -> None:
    up, node = (options_of(words_of(section(name)["ExecStart"])) for name in UNITS)
    assert "--foreground" in up and up["--cluster"] == "%i"
    assert node["--join"] == "/etc/elastic-rl/%i.join" == section("node", "Unit")["AssertPathExists"]
    assert up["--run_dir"] == node["--run_dir"] == "/var/lib/elastic-rl/runs"
    down = section("node")["ExecStopPost"].partition("exec ")[2].partition(";")[0]
    assert options_of(words_of(down)) == {"--cluster": "%i", "--run_dir": node["--run_dir"]}


@units
def test_services_outlive_a_command_that_is_killed(name: str) -> None:
    service = section(name)
    assert service["KillMode"] == "process" and service["OOMPolicy"] == "continue"
    assert service["Restart"] == "on-failure" and section(name, "Unit")["StartLimitIntervalSec"] == "0"
    # What the next start would not see of the processes of this one, or they of it.
    assert not service.keys() & {"PrivateTmp", "PrivateIPC", "PrivatePIDs", "ProcSubset", "RuntimeDirectory",
                                 "DynamicUser", "RemoveIPC"}


@units
def test_what_a_run_needs_is_not_hidden_from_it(name: str) -> None:
    assert not section(name).keys() & {"PrivateDevices", "PrivateNetwork", "PrivateUsers", "ProtectKernelTunables",
                                       "RestrictNamespaces", "MemoryDenyWriteExecute", "SystemCallFilter", "UMask"}
    assert int(section(name)["LimitNOFILE"]) >= 65536 and section(name)["TasksMax"] == "infinity"


@units
def test_unit_is_stopped_after_all_has_had_time_to_end(name: str) -> None:
    grace_s = seconds(options_of(words_of(section(name)["ExecStart"])))
    assert int(section(name)["TimeoutStopSec"]) >= grace_s + ENDS_S


def test_both_units_protect_the_machine_alike() -> None:
    different = {key for key in {*section("cluster"), *section("node")}
                 if section("cluster").get(key) != section("node").get(key)}
    assert different == {"EnvironmentFile", "ExecStart", "ExecStopPost"}


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
@units
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    program = tmp_path / "elastic-rl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / f"elastic-rl-{name}@lab.service"
    unit.write_text(UNITS[name].read_text().replace(PROGRAM, str(program)))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and unit.name not in done.stderr, done.stderr
