"""The command line on real coordinators and a real etcd. The compute plane's records are written by the tests."""

from __future__ import annotations

import http.server
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import http_servers
from support.coordinators import Replicas, write_tokens
from support.etcd_server import EtcdServers
from support.forked import ForkedProcess
from support.waiting import wait_until

from elastic_rl.cli import main
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.cluster_records import Host, HostPhase, HostState, HostStatus, RunState, ServiceStatus
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    ExternalEngine,
    Operation,
    PoolSpec,
    RestartRequest,
    SampleRecord,
)
from elastic_rl.net import http_client

COMMAND, FORKED = "elastic_rl.cli.main", "support.command_line"
POOL = "rollout"
_LIMIT_S = 120.0


@dataclass
class Control:
    """Two coordinators, their records, and the command line."""

    replicas: Replicas
    etcd: EtcdClient
    keys: Keys
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    posted: list[str] = field(default_factory=list)
    """What the notification service received."""

    @property
    def target(self) -> list[str]:
        """Options that name the cluster."""
        return ["--url=" + ",".join(self.replicas.urls[name] for name in self.replicas.running), self.token_file]

    @property
    def token_file(self) -> str:
        return f"--token-file={self.replicas.credentials}"

    def start(self, *args: str, target: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """The command line as a process of its own, with pipes."""
        self.running.append(ForkedProcess([FORKED, *args, *(target or self.target)], stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE))
        return self.running[-1]

    def pool(self, *ready: str, desired: int = 0) -> None:
        """The pool has exactly these engines, all ready."""
        have = {kv.key.removeprefix(self.keys.engines_prefix()) for kv in
                self.etcd.range(self.keys.engines_prefix())[0]}
        for gone in have - set(ready):
            self.etcd.delete(self.keys.engine(gone))
        for engine_id in ready:
            self.engine(engine_id)
        if desired:
            self.etcd.put(self.keys.pool_spec(POOL), PoolSpec(name=POOL, desired=desired).encode())

    def engine(self, engine_id: str, **more: Any) -> None:
        self.etcd.put(self.keys.engine(engine_id), Engine(id=engine_id, pool=POOL, epoch=1, **{
            "state": EngineState.READY, **more}).encode())

    def operations(self) -> list[Operation]:
        return [Operation.decode(kv.value) for kv in self.etcd.range(self.keys.operations_prefix())[0]]

    def begun(self, before: int) -> Operation:
        """The operation that comes after the first ``before`` ones."""
        return wait_until(lambda: self.operations()[before:], what="the operation")[0]


@pytest.fixture(scope="module")
def service() -> Iterator[tuple[str, list[str]]]:
    """A notification service: its Apprise URL, and what was posted to it."""
    posted: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["content-length"])).decode())
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http_servers.serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"json://127.0.0.1:{server.server_port}", posted


@pytest.fixture(scope="module")
def control(etcd_servers: EtcdServers, tmp_path_factory: pytest.TempPathFactory, service: tuple[str, list[str]]
            ) -> Iterator[Control]:
    keys = Keys(f"t-cli-{os.getpid()}")
    url, posted = service
    settings = {"alerts": {"urls": [url], "group_wait_s": 0.2, "max_notifications_per_minute": 1000}}
    with EtcdClient(etcd_servers.endpoints, call_timeout_s=2.0) as etcd:
        etcd.put(keys.pool_spec(POOL), PoolSpec(name=POOL, desired=1).encode())
        made = Control(Replicas(tmp_path_factory.mktemp("cli"), keys, etcd_servers.endpoints, settings), etcd, keys,
                       posted=posted)
        try:
            made.replicas.start("a", "b")
            yield made
        finally:
            for process in made.running:
                process.kill()
                process.wait(60)
            made.replicas.close()


@pytest.fixture
def run(control: Control, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: exit code, stdout and stderr."""

    def call(*args: str, target: Sequence[str] = ()) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as e:
            main.main([*args, *(target or control.target)])
        captured = capsys.readouterr()
        return int(e.value.code or 0), captured.out, captured.err

    return call


Run = Callable[..., tuple[int, str, str]]


class Lines:
    """What a process writes, line by line, without ever waiting for too long."""

    def __init__(self, process: subprocess.Popen[bytes], stream: str = "stdout") -> None:
        self.seen: list[str] = []
        self._source = getattr(process, stream)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._source:
            self.seen.append(line.decode().rstrip("\n"))

    def until(self, check: Callable[[list[str]], Any], what: str) -> Any:
        return wait_until(lambda: check(list(self.seen)), what=f"{what} among {self.seen}")


def interrupted(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    return process.wait(_LIMIT_S)


def meanwhile(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


# -- operations --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("output", ["table", "json"])
def test_scale_with_wait_shows_progress_until_the_last_engine_is_ready(control: Control, run: Run, output: str) -> None:
    control.pool("e0", desired=1)
    before = len(control.operations())

    def driver() -> None:
        op = control.begun(before)
        wait_until(lambda: control.operations()[before].phase == "starting", what=op.id)
        control.engine("e1")
        wait_until(lambda: control.operations()[before].done == 2, what=op.id)
        control.engine("e2")

    acting = meanwhile(driver)
    code, stdout, stderr = run("scale", "3", "--wait", "-o", output)
    acting.join(_LIMIT_S)
    assert code == Exit.OK, stderr
    assert "scale of pools/rollout: accepted" in stderr, "progress goes to stderr"
    if output == "json":
        assert json.loads(stdout)["state"] == "succeeded"
    else:
        assert "succeeded: scale of pools/rollout to 3" in stdout and "3 engines ready" in stdout


def test_operation_continues_after_a_timeout_and_can_be_cancelled(control: Control, run: Run) -> None:
    control.pool("e0", desired=1)
    code, stdout, stderr = run("scale", "4", "--wait", "--timeout", "1")
    op = control.operations()[-1]
    assert code == Exit.DEADLINE and not stdout
    assert "continues" in stderr and f"elastic-rl operations cancel {op.id}" in stderr
    assert all(option in stderr for option in control.target), "the next command must address the same cluster"
    assert not op.state.ended
    assert [o["id"] for o in json.loads(run("operations", "--state", "running", "-o", "json")[1])] == [op.id]
    assert "1/4" in run("operations", "--limit=1")[1]

    assert run("operations", "cancel", op.id)[0] == Exit.OK
    code, stdout, stderr = run("operations", "wait", op.id, "-o", "json")
    assert (code, json.loads(stdout)["state"]) == (Exit.FAILED, "cancelled") and "cancelled by" in stderr
    assert "cancelled" in run("operations", "show", op.id)[1]
    code, _, stderr = run("operations", "show", "op-none")
    assert code == Exit.REFUSED and "hint: `elastic-rl operations --" in stderr


def test_autoscaling_is_set_listed_and_ended(control: Control, run: Run) -> None:
    control.pool("e0", desired=2)
    assert "automatic" not in run("autoscale")[1]
    code, stdout, stderr = run("autoscale", POOL, "--min", "2", "--max", "6")
    assert code == Exit.OK and "follows its load, from 2 to 6 engines" in stdout, stderr
    assert "automatic" in run("autoscale")[1]
    code, stdout, _ = run("autoscale", POOL, "--max=5", "--dry-run", "-o", "json")
    found = json.loads(stdout)
    assert (code, found["mode"], found["min_engines"], found["max_engines"]) == (Exit.OK, "dry_run", 2, 5)
    assert "dry_run" in run("autoscale", POOL)[1]
    assert "set the number within" in run("autoscale", POOL, "--external")[1]
    code, _, stderr = run("scale", "7")
    assert code == Exit.REFUSED and "autoscaled from 2 to 5 engines" in stderr
    assert "stays as it is" in run("autoscale", POOL, "--off")[1]
    assert json.loads(run("autoscale", "-o", "json")[1])[0]["mode"] == "disabled"
    code, _, stderr = run("autoscale", "none", "--max=5")
    assert code == Exit.REFUSED and "elastic-rl pools" in stderr
    assert run("autoscale", POOL, "--min=9")[0] == Exit.REFUSED, "beyond the most engines"


def test_operation_continues_after_an_interrupt(control: Control) -> None:
    control.pool("e0", desired=1)
    process = control.start("scale", "5", "--wait")
    lines = Lines(process, "stderr")
    lines.until(lambda found: any("1/5" in line for line in found), "progress")
    assert interrupted(process) == Exit.INTERRUPTED
    op = control.operations()[-1]
    lines.until(lambda found: any(f"elastic-rl operations cancel {op.id}" in line for line in found), "the hint")
    assert not op.state.ended


def test_drain_ends_with_the_replacement_and_a_dry_run_changes_nothing(control: Control, run: Run) -> None:
    control.pool("e0", "e1", desired=2)
    before = len(control.operations())
    code, stdout, _ = run("engines", "drain", "e1", "--dry-run")
    assert code == Exit.OK and "would be done: engine e1 leaves pool rollout" in stdout
    assert len(control.operations()) == before

    def driver() -> None:
        control.begun(before)
        control.etcd.delete(control.keys.engine("e1"))
        wait_until(lambda: control.operations()[before].phase == "replacing", what="replacing")
        control.engine("e2")

    acting = meanwhile(driver)
    code, stdout, stderr = run("engines", "drain", "e1", "--wait")
    acting.join(_LIMIT_S)
    assert code == Exit.OK, stderr
    assert "engine e1 has left pool rollout" in stdout
    code, _, stderr = run("engines", "drain", "e1")
    assert code == Exit.REFUSED and "no engine" in stderr and "elastic-rl engines" in stderr


def test_restart_is_confirmed_by_an_option_and_can_be_cancelled(control: Control, run: Run) -> None:
    code, stdout, _ = run("restart", "trainer", "--reason", "new driver", "--yes", "-o", "json")
    op = json.loads(stdout)
    assert code == Exit.OK and op["params"]["reason"] == "new driver"
    assert "cancelled: restart of trainer" in run("operations", "cancel", op["id"])[1]
    assert run("restart", "everything")[0] == Exit.REFUSED


def test_external_engine_is_registered_or_the_reason_is_printed(control: Control, run: Run) -> None:
    before, url = len(control.operations()), "http://10.0.0.9:30000"
    code, stdout, _ = run("engines", "register", url, "--dry-run")
    assert code == Exit.OK and f"{url} joins pool rollout" in stdout and len(control.operations()) == before

    def driver() -> None:
        key, at = control.keys.external_engine(url), control.begun(before).params["url"]
        request = ExternalEngine.decode(control.etcd.get(key).value)
        control.etcd.put(key, request.replace(ended=f"no SGLang server answers at {at}").encode())

    acting = meanwhile(driver)
    code, _, stderr = run("engines", "register", url, "--wait")
    acting.join(_LIMIT_S)
    assert code == Exit.FAILED and "no SGLang server answers" in stderr
    assert control.etcd.get(control.keys.external_engine(url)) is None
    control.pool("e0", desired=1)
    control.engine("x0", external=True, url=url)
    code, stdout, _ = run("engines", "deregister", "x0")
    assert code == Exit.OK and "begun: drain of engines/x0" in stdout
    code, _, stderr = run("engines", "deregister", "e0")
    assert code == Exit.REFUSED and "was started by its pool" in stderr
    assert "x0" in run("engines")[1], "without a command it lists"
    assert run("engines", "register", "moon")[0] == run("engines", "register", url, "--pool", "none")[0] == Exit.REFUSED


class Terminal:
    """A command line on a terminal of so many columns."""

    def __init__(self, control: Control, *args: str, columns: int = 80) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", COMMAND, *args, *control.target], stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=_take_terminal,
            env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"})
        control.running.append(self.process)
        os.close(slave)
        self.seen = ""

    def until(self, text: str) -> None:
        end = time.monotonic() + _LIMIT_S
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} is not in {self.seen!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def end(self) -> int:
        code = self.process.wait(_LIMIT_S)
        os.close(self.master)
        return code


def _take_terminal() -> None:
    import fcntl
    import termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_restart_asks_on_a_terminal(control: Control) -> None:
    def wanted() -> int:
        found = control.etcd.get(control.keys.restart("trainer"))
        return RestartRequest.decode(found.value).generation if found else 0

    before = wanted()
    asked = Terminal(control, "restart", "trainer")
    asked.until("Restart trainer? [y/N]")
    asked.type("n\n")
    assert asked.end() == Exit.FAILED and wanted() == before
    asked = Terminal(control, "restart", "trainer")
    asked.until("[y/N]")
    asked.type("y\n")
    asked.until("begun: restart of trainer")
    assert asked.end() == Exit.OK and wanted() == before + 1


# -- watching ----------------------------------------------------------------------------------------------------------
def test_watch_in_a_pipe_prints_changes_without_heartbeats(control: Control) -> None:
    control.pool("w0", desired=1)
    process = control.start("engines", "--watch", "-o", "json")
    lines = Lines(process)
    lines.until(lambda found: len(found) == 1, "the first state")
    control.engine("w0", updated_at=time.time())
    control.engine("w0", state=EngineState.DRAINING, updated_at=time.time())
    lines.until(lambda found: len(found) >= 2, "the change")
    states = [json.loads(line)[0]["state"] for line in lines.seen]
    assert states == ["ready", "draining"]
    assert interrupted(process) == Exit.OK


def test_watch_on_a_terminal_redraws_in_place_and_ends_with_ctrl_c(control: Control) -> None:
    control.pool("w0", desired=1)
    watching = Terminal(control, "engines", "--watch", columns=60)
    watching.until("Ctrl-C ends")
    control.engine("w0", state=EngineState.DRAINING)
    watching.until("draining")
    watching.until("\x1b[1A")  # the cursor goes up again
    watching.type("\x03")
    assert watching.end() == Exit.OK


def test_events_are_followed_over_a_killed_replica(control: Control) -> None:
    control.replicas.start("c")
    order = ["c", "a", "b"]
    urls = "--url=" + ",".join(control.replicas.urls[n] for n in order)
    process = control.start("events", "--follow", "--kind", "queue.*", "-o", "json",
                            target=[urls, control.token_file])
    lines = Lines(process)

    def emit(number: int) -> None:
        events.emit(control.etcd, control.keys, event_kinds.QUEUE_REPLACED, str(number), f"number {number}")
        events.emit(control.etcd, control.keys, event_kinds.TRACKER_FAILED, str(number), "not wanted")

    for number in range(3):
        emit(number)
    lines.until(lambda found: len(found) >= 3, "the first three")
    control.replicas.kill("c")
    for number in range(3, 6):
        emit(number)
    lines.until(lambda found: len(found) >= 6, "those after the kill")
    control.replicas.leader()
    emit(6)
    lines.until(lambda found: len(found) >= 7, "the last one")
    assert [json.loads(line)["subject"] for line in lines.seen] == [str(n) for n in range(7)]
    assert interrupted(process) == Exit.OK


def test_hosts_are_listed_filtered_and_shown_one_by_one(control: Control, run: Run) -> None:
    keys = ClusterKeys(control.keys.job)
    host = Host(id="gpu-7", incarnation="i2", address="10.0.0.7", cpus=128, gpus=8, memory_bytes=1 << 40,
                labels={"rack": "b4"}, release="0.2.0")
    registered = control.etcd.txn([], [Op.put(keys.host(host.id), host.encode()),
                                       Op.put(keys.host_registration(host.id), host.encode())]).revision
    services = {"dcs-j": ServiceStatus(state=RunState.RUNNING, pid=4711),
                "ray-worker": ServiceStatus(state=RunState.ENDED, restarts=2, reason="it is restarted in 4 s")}
    ready = HostState(phase=HostPhase.READY, incarnation="i2", since_s=0.0)
    lost = HostState(phase=HostPhase.LOST, incarnation="i1", since_s=0.0, reason="not heard")
    control.etcd.txn([], [Op.put(key, record.encode()) for key, record in (
        (keys.host_status(host.id), HostStatus(registration=registered, services=services)),
        (keys.host_state(host.id), ready), (keys.host_state("gpu-8"), lost))])

    code, stdout, stderr = run("hosts")
    assert code == Exit.OK, stderr
    rows = [line.split() for line in stdout.splitlines()]
    assert rows[0] == ["host", "phase", "address", "cpus", "gpus", "memory", "services", "reason"]
    assert rows[1][:6] == ["gpu-7", "ready", "10.0.0.7", "128", "8", "1.0"]
    assert "ray-worker (ended), dcs-j" in stdout and rows[2][:2] == ["gpu-8", "lost"] and "not heard" in stdout
    assert [h["id"] for h in json.loads(run("hosts", "--phase", "lost", "-o", "json")[1])] == ["gpu-8"]
    assert "rack=b4" in run("hosts", "-o", "wide")[1]
    assert "it is restarted in 4 s" in run("hosts", "gpu-7")[1]
    code, _, stderr = run("hosts", "gpu-9")
    assert code == Exit.REFUSED and "no host 'gpu-9'" in stderr and "`elastic-rl hosts --" in stderr


def test_events_are_filtered_by_kind_and_number(control: Control, run: Run) -> None:
    for number in range(3):
        events.emit(control.etcd, control.keys, event_kinds.POOL_SCALED, "x", f"choice {number}")
    stdout = run("events", "--kind", "pool.*", "--limit", "2", "--since", "5m")[1]
    assert "choice 1" in stdout and "choice 2" in stdout and "choice 0" not in stdout and "leader.elected" not in stdout


# -- reads and access --------------------------------------------------------------------------------------------------
def test_status_shows_leader_pools_and_members(control: Control, run: Run) -> None:
    control.pool("e0", desired=1)
    member = Membership(control.etcd, control.keys, "advantages", "advantages-0", ttl_s=5).start()
    try:
        code, stdout, stderr = run("status")
        assert code == Exit.OK, stderr
        assert any(line.split()[:1] == ["leader"] and "http://" in line for line in stdout.splitlines())
        assert any(line.split()[:2] == [POOL, "1"] for line in stdout.splitlines())
        assert "advantages-0" in run("members", "--role", "advantages")[1]
        quiet = LastSeen(role="advantages", id="advantages-1", incarnation="i", first_seen=1.0, suspected_at=2.0,
                         suspected_leader_s=1e9)  # the leader clock never comes so far that it is dead
        control.etcd.put(control.keys.registry_entry("advantages", "advantages-1"), quiet.encode())
        for command in (["status"], ["members", "--role", "advantages"]):
            (row,) = [line for line in run(*command)[1].splitlines() if "advantages-1" in line]
            assert row.split()[-1] == "suspected"
        found = json.loads(run("status", "-o", "json")[1])
        assert found["job"]["name"] == control.keys.job and len(found["pools"]) == 1
        assert _completed(control, "elastic-rl restart roles/") == ["roles/advantages"]
    finally:
        member.close()


_HOSTILE = "<script>alert(1)</script> \x1b[2J\x1b]0;owned\x07 \u202eright\u202c \x00 \x9b31m [red]markup[/red] "


def _samples(control: Control) -> None:
    for slot, (step, reward) in enumerate([(1, 0.0), (2, 1.0)]):
        record = SampleRecord(
            step=step, group=step, index=0, prompt=f"prompt of {step}", response=_HOSTILE + "x" * 2000, reward=reward,
            reward_parts={"answer": reward, "\x1b[5m": 1.0}, finish_reason="stop\x1b[31m", versions=[3, 4])
        control.etcd.put(control.keys.sample(slot), record.encode())


@pytest.mark.parametrize("output", [(), ("-o", "wide"), ("--full",), ("-o", "json")], ids=" ".join)
def test_samples_cannot_steer_the_terminal(control: Control, run: Run, output: Sequence[str]) -> None:
    _samples(control)
    code, stdout, stderr = run("samples", "--min-reward", "0.5", *output)
    assert code == Exit.OK, stderr
    assert "prompt of 1" not in stdout
    assert "<script>alert(1)</script>" in stdout and "[red]markup[/red]" in stdout  # as text, nothing is swallowed
    assert not {c for c in stdout if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs")}
    if output == ("-o", "json"):
        assert json.loads(stdout)[0]["response"].startswith(_HOSTILE)


def test_samples_show_whole_texts_on_demand(control: Control, run: Run) -> None:
    _samples(control)
    assert run("samples")[1].count("x" * 200) == 0
    whole = run("samples", "--full", "--step", "2")[1]
    assert "x" * 2000 in whole and "prompt of 2" in whole and "prompt of 1" not in whole
    assert run("samples", "--step", "77")[1].strip() == "none"


def _completed(control: Control, line: str) -> list[str]:
    """What the shell gets when Tab is pressed at the end of a line; a slow machine gets several tries."""
    words = line.split(" ")

    def ask() -> list[str]:
        shell = ForkedProcess([FORKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={
            **os.environ, "ELASTIC_RL_URL": control.target[0].removeprefix("--url="),
            "ELASTIC_RL_TOKEN_FILE": str(control.replicas.credentials), "COMP_WORDS": line,
            "_ELASTIC_RL_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words) - 1)})
        stdout, stderr = shell.communicate(timeout=_LIMIT_S)
        assert (shell.returncode, stderr) == (0, "")
        return stdout.split()

    return list(wait_until(ask, what=f"completions of {line!r}"))


def test_names_are_completed_from_the_running_cluster(control: Control) -> None:
    control.pool("e10", "e11", "f0", desired=3)
    assert _completed(control, "elastic-rl engines drain e1") == ["e10", "e11"]
    assert _completed(control, "elastic-rl scale 3 --pool r") == [POOL]


def test_wrong_token_is_reported_with_its_file(control: Control, run: Run, tmp_path: Path) -> None:
    keys = Keys(f"{control.keys.job}-strict")
    control.etcd.put(keys.pool_spec(POOL), PoolSpec(name=POOL, desired=1).encode())
    strict = Replicas(tmp_path, keys, control.replicas.etcd_servers)
    write_tokens(strict.token_table, eve="viewer", ada="operator")
    try:
        strict.start("strict")
        mine = tmp_path / "mine"

        def call(token: str, *args: str) -> tuple[int, str, str]:
            mine.write_text(token)
            return run(*args, target=("--url", strict.urls["strict"], "--token-file", str(mine)))

        code, _, stderr = call("wrong", "pools")
        assert code == Exit.REFUSED and str(mine) in stderr
        assert call("eve", "pools")[0] == Exit.OK
        code, _, stderr = call("eve", "scale", "2")
        assert code == Exit.REFUSED and "operator's token" in stderr
        assert call("ada", "scale", "2", "--dry-run")[0] == Exit.OK
        code, _, stderr = call("ada", "alerts", "test")
        assert code == Exit.FAILED and "alerts.urls" in stderr, "it has no receiver"
    finally:
        strict.close()


def test_dashboard_link_opens_one_session_of_its_role(control: Control, run: Run) -> None:
    for options, role in (((), "operator"), (("--viewer",), "viewer")):
        code, stdout, stderr = run("dashboard", *options)
        assert code == Exit.OK and f"works once, as {role}" in stderr
        url, _, link = stdout.strip().partition("/#link=")
        opened = http_client.request("POST", f"{url}/v1/session", json={"link": link}, timeout=20)
        assert opened.status_code == 200 and opened.json()["role"] == role
        assert http_client.request("POST", f"{url}/v1/session", json={"link": link}, timeout=20).status_code == 401
    found = json.loads(run("dashboard", "-o", "json")[1])
    assert set(found) == {"url", "role", "expires_at"} and found["expires_at"] > time.time()


def test_request_without_a_token_says_which_option_is_missing(control: Control, run: Run) -> None:
    code, _, stderr = run("pools", target=control.target[:1])
    assert code == Exit.REFUSED and "--token-file" in stderr


# -- alerts ------------------------------------------------------------------------------------------------------------
def test_alerts_are_silenced_and_unsilenced(control: Control, run: Run) -> None:
    code, stdout, _ = run("alerts", "silence", "pool.*", "--for", "10m", "--comment", "maintenance", "-o", "json")
    made = json.loads(stdout)
    assert code == Exit.OK and made["until"] - made["created_at"] == pytest.approx(600)
    stdout = run("alerts", "silences")[1]
    assert made["id"] in stdout and "maintenance" in stdout
    assert run("alerts")[0] == Exit.OK
    assert run("alerts", "unsilence", made["id"])[0] == Exit.OK
    assert json.loads(run("alerts", "silences", "-o", "json")[1]) == []
    code, _, stderr = run("alerts", "unsilence", made["id"])
    assert code == Exit.REFUSED and "elastic-rl alerts silences" in stderr


def test_alert_test_prints_the_result_of_each_receiver(control: Control, run: Run) -> None:
    code, stdout, stderr = run("alerts", "test")
    assert code == Exit.OK, stdout + stderr
    assert "delivered" in stdout and any("[TEST]" in message for message in control.posted)
