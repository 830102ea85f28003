"""The batch script in ops/slurm, with stand-ins for Slurm and for elastic-rl that write down how they are called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launchers import ENDS_S, OPS, options_of, seconds
from support.waiting import wait_until

SCRIPT = OPS / "slurm" / "elastic-rl.sbatch"
SHELLCHECK = Path(sys.prefix) / "bin" / "shellcheck"

PROGRAM = r"""#!/usr/bin/env bash
printf '%s\n' "elastic-rl $*" >>"$STUBS/calls"
stay() {
    trap 'echo "end of $1" >>"$STUBS/calls"; exit 0' TERM
    while [ "$1" != follower ] || [ ! -s "$STUBS/run_ended" ]; do sleep 0.02 & wait "$!"; done
    exit "$(cat "$STUBS/run_ended")"
}
for word in "$@"; do
    case $word in --run_dir=*) folder=${word#*=} ;; --name=*) name=${word#*=} ;; esac
done
next() { # the code of this call, where the test wants one: one line a call
    [ -s "$STUBS/$1.codes" ] || return
    head -n 1 "$STUBS/$1.codes"
    sed -i 1d "$STUBS/$1.codes"
}
code=$(next "$1")
[ -z "$code" ] || exit "$code"
case $1 in
    up) mkdir -p "$folder/_clusters/lab"; echo secret >"$folder/_clusters/lab/cluster.join"; stay "$name" ;;
    node) stay "$name" ;;
    attach) stay follower ;;
esac
"""
SRUN = r"""#!/usr/bin/env bash
printf '%s\n' "srun $*" >>"$STUBS/calls"
for word in "$@"; do case $word in --ntasks=*) n=${word#*=} ;; esac; done
for ((i = 0; i < n; i++)); do SLURM_PROCID=$i SLURMD_NODENAME=node-$i "${@: -1}" & pids+=("$!"); done
trap 'kill -KILL "${pids[@]}" 2>/dev/null' TERM  # as the real one does
for pid in "${pids[@]}"; do while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done; done
"""
STUBS = {"elastic-rl": PROGRAM, "srun": SRUN,
         "squeue": '#!/bin/sh\necho "${STATE:-RUNNING}"\n',
         "scontrol": '#!/bin/sh\necho "scontrol $*" >>"$STUBS/calls"\n',
         "getent": '#!/bin/sh\n[ -e "$STUBS/no_address" ] || echo "10.0.0.7 STREAM $2"\necho "127.0.1.1 STREAM"\n',
         "sleep": '#!/bin/sh\nexec /bin/sleep 0.02\n'}


class Job:
    """A job of Slurm, on two nodes by default."""

    def __init__(self, folder: Path, number: int = 7) -> None:
        self.folder, self.stubs, self._number = folder, folder / "stubs", number
        self._log = folder / "output"
        self.stubs.mkdir()
        for name, text in STUBS.items():
            (self.stubs / name).write_text(text)
            (self.stubs / name).chmod(0o755)
        self.process: subprocess.Popen[str] | None = None

    def start(self, *args: str, nodes: int = 2, **env: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ERL_", "SLURM"))}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", SCRIPT, *args], stdout=log, stderr=log, text=True, cwd=self.folder,
                env={**kept, "PATH": f"{self.stubs}:{os.environ['PATH']}", "STUBS": str(self.stubs),
                     "SLURM_SUBMIT_DIR": str(self.folder), "SLURM_JOB_ID": str(self._number),
                     "SLURMD_NODENAME": "node-a", "SLURM_JOB_NUM_NODES": str(nodes),
                     "ERL_PROGRAM": str(self.stubs / "elastic-rl"), **env})

    def answer(self, command: str, *codes: int) -> None:
        """Has the next calls of a command end at once, with these codes."""
        (self.stubs / f"{command}.codes").write_text("".join(f"{code}\n" for code in codes))

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def calls(self) -> list[str]:
        path = self.stubs / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def await_call(self, start: str, times: int = 1) -> None:
        wait_until(lambda: sum(call.startswith(start) for call in self.calls) >= times, what=f"{times} × {start}")

    def options(self, command: str) -> list[dict[str, str]]:
        """The options of each call of a command of elastic-rl."""
        return [options_of(call.split()) for call in self.calls if call.startswith(f"elastic-rl {command} ")]

    def told_to_end(self) -> tuple[int, str]:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> tuple[int, str]:
        """Exit code and output."""
        assert self.process is not None
        return self.process.wait(60), self.said


@pytest.fixture
def job(tmp_path: Path) -> Any:
    made = Job(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.told_to_end()


def test_run_has_a_cluster_and_its_end_ends_the_job(job: Job) -> None:
    job.start("--job=a", "-c", "a.yaml", nodes=3)
    job.await_call("elastic-rl node", 2)
    job.await_call("elastic-rl attach a ")
    (up,), nodes = job.options("up"), job.options("node")
    folder = job.folder / "runs"
    join_file = folder / "host-0/_clusters/lab/cluster.join"
    assert up == {"--foreground": "", "--cluster": "lab", "--run_dir": f"{folder}/host-0", "--name": "host-0",
                  "--address": "10.0.0.7"}
    assert {(node["--name"], node["--run_dir"]) for node in nodes} == {
        (f"host-{i}", f"{folder}/host-{i}") for i in (1, 2)}
    assert all(node["--join"] == str(join_file) and seconds(node) == 0 for node in nodes)
    (srun,) = (call for call in job.calls if call.startswith("srun"))
    assert "--ntasks=2 " in srun and "--relative=1 " in srun, "the first node has the first host"
    assert job.options("train") == [{"--detach": "", "--cluster": "lab", "--run_dir": f"{folder}/host-0", "--job": "a"}]
    (job.stubs / "run_ended").write_text("1")  # it has failed
    code, said = job.ended()
    assert code == 1, said
    assert job.calls[-1] == "end of host-0", "the others need its etcd"
    assert {"end of host-1", "end of host-2"} <= set(job.calls)
    assert not any(call.startswith("scontrol") for call in job.calls)


def test_signal_of_the_time_limit_suspends_the_cluster_and_requeues_the_job(job: Job) -> None:
    job.start("--job=a")
    job.await_call("elastic-rl attach")
    job.await_call("elastic-rl node")
    code, said = job.told_to_end()
    assert code == 143 and "the job is requeued" in said
    assert [call for call in job.calls if call.startswith(("end of host", "scontrol"))] == [
        "end of host-1", "end of host-0", "scontrol requeue 7"]

    # The run of before is resumed by `up`, and followed: it is not submitted again.
    job.start("--job=a", ERL_REQUEUE="0")
    job.await_call("elastic-rl attach", 2)
    assert len(job.options("train")) == 1 and len(job.options("up")) == 2
    code, said = job.told_to_end()
    assert code == 143 and sum(call.startswith("scontrol") for call in job.calls) == 1


def test_first_host_that_does_not_start_ends_all_and_says_so(job: Job) -> None:
    stale = job.folder / "runs/host-0/_clusters/lab/cluster.join"
    stale.parent.mkdir(parents=True)
    stale.write_text("of an allocation before")
    job.answer("up", 4)
    job.start()
    code, said = job.ended()
    assert code == 4 and "failed: the first host has ended" in said
    assert not any(call.startswith(("srun", "scontrol")) for call in job.calls)


def test_run_that_is_refused_ends_all_and_is_submitted_by_the_next_job(job: Job) -> None:
    job.answer("train", 2)
    job.start("--job=a")
    code, said = job.ended()
    assert code == 2 and "the run was not submitted" in said and job.calls[-1] == "end of host-0"
    job.start("--job=a")
    job.await_call("elastic-rl attach")
    assert len(job.options("train")) == 2


def test_follower_that_lost_the_cluster_looks_again(job: Job) -> None:
    job.answer("attach", 3, 137, 0)
    job.start("--job=a")
    code, said = job.ended()
    assert code == 0, said
    assert sum(call.startswith("elastic-rl attach") for call in job.calls) == 3


def test_host_whose_command_was_killed_starts_it_again_and_one_that_is_refused_does_not(job: Job) -> None:
    job.answer("node", 137, 3, 2)
    job.start()
    job.await_call("elastic-rl node", 3)
    wait_until(lambda: "the other hosts have ended" in job.said, what="the job to say so")
    assert job.told_to_end()[0] == 143, "it goes on without them"
    assert len(job.options("node")) == 3


def test_hosts_of_another_job_join_by_a_file_and_drain(job: Job) -> None:
    file = job.folder / "cluster.join"
    file.write_text("secret")
    job.start(ERL_JOIN=str(file), ERL_INTERFACE="")
    job.await_call("elastic-rl node", 2)
    nodes = job.options("node")
    assert {node["--name"] for node in nodes} == {"job-7-0", "job-7-1"} and {node["--join"] for node in nodes} == {
        str(file)}
    assert not job.options("up")
    warning_s = int(SCRIPT.read_text().partition("--signal=B:TERM@")[2].split()[0])
    assert warning_s >= seconds(nodes[0]) + ENDS_S > ENDS_S
    assert job.told_to_end()[0] == 143 and {"end of job-7-0", "end of job-7-1"} <= set(job.calls)


def test_node_without_an_address_says_what_to_set(job: Job) -> None:
    (job.stubs / "no_address").touch()
    job.start()
    code, said = job.ended()
    assert code == 4 and "set ERL_INTERFACE" in said and not job.calls


def test_script_passes_shellcheck() -> None:
    done = subprocess.run([SHELLCHECK, "--shell=bash", SCRIPT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
