"""The Ray of a run over two machines: etcd, coordinator, agents, Ray with TLS and the router are real, engines and
trainer are stubs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import psutil
import pytest
from support.lab import Lab, Machine, lab_of
from support.stub_run import put_stub_in_place
from support.tiers import full
from support.waiting import wait_until

from elastic_rl.coordinator.client.admin_client import RequestRefused
from elastic_rl.etcd import fencing
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState, ExternalEngine, Formation, PoolStatus

pytestmark = pytest.mark.timeout(1200)
SETTINGS = ("--coordinator.replicas=1", "--dcs.arena_bytes=33554432")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of("ab", f"j-{secrets.token_hex(3)}") as made:
        made.start(*SETTINGS)
        yield made


def engines(lab: Lab) -> dict[str, str]:
    """Id of each ready engine, with the name of its host."""
    names = {machine.address: name for name, machine in lab.machines.items()}
    with lab.etcd() as etcd:
        return {e.id: names[e.host] for e, _ in readable(etcd.range(Keys(lab.job).engines_prefix())[0], Engine)
                if e.state is EngineState.READY}


def wait_for_engines(lab: Lab, count: int, *, on_b: bool) -> None:
    """Returns when there are so many. Ray chooses the host by what is free there, and the run's has more on it."""
    wait_until(lambda: len(engines(lab)) == count and ("b" in engines(lab).values()) == on_b,
               what=f"{count} engines, {'some' if on_b else 'none'} of them on b")


@full(proved_in="tests/unit/driver/test_host_selection.py tests/integration/host/test_ray_workers.py",
      why="Ray and Serve over two hosts, once more")
def test_engines_and_roles_are_on_hosts_with_their_labels_and_wait_where_none_has_them(
        monkeypatch: pytest.MonkeyPatch) -> None:
    with lab_of("ab", f"j-{secrets.token_hex(3)}") as lab:
        lab.start(*SETTINGS, joining=["--label=zone=b"])
        a, b = lab.machines.values()
        wait_until(lambda: lab.phase("a") == lab.phase("b") == "ready", what="both hosts")
        put_stub_in_place(lab.folder, monkeypatch, with_plane=True)
        job = [f"--job={lab.job}", *a.location]
        a.run("train", "--detach", *job, "--rollout.engines=2", "--sft.max_steps=0",
              "--rollout.host_selector={zone: b}",
              "--roles={advantages: {replicas: 2, cpus: 0.5, host_selector: {zone: b}}}")
        wait_until(lambda: list(engines(lab).values()) == ["b", "b"], what="two engines on b")
        wait_until(lambda: len(replicas(b)) == 2, what="two replicas on b")
        assert not replicas(a)

        a.run("drain", "b", "--within=20", "--wait", *a.location)
        wait_until(lambda: "cordoned, drained or lost: b" in message(lab), what="the reason for which the pool waits")
        wait_until(lambda: not engines(lab) and not replicas(b), what="the end of what was on b")
        a.run("stop", lab.job, *a.location)


def replicas(machine: Machine) -> list[psutil.Process]:
    """Replicas of the role with hosts of its own."""
    return [p for p in machine.computes() if "ServeReplica:advantages" in " ".join(p.cmdline())]


def message(lab: Lab) -> str:
    """What the pool waits for."""
    with lab.etcd() as etcd:
        status = readable_one(etcd.get(Keys(lab.job).pool_status("rollout")), PoolStatus)
        return status.message if status else ""


def two_hosts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, Machine, list[str]]:
    """The hosts once both are ready, the first one with a run that is a stub, and the options that name its job."""
    a, b = lab.machines.values()
    wait_until(lambda: lab.phase("a") == lab.phase("b") == "ready", what="both hosts")
    put_stub_in_place(lab.folder, monkeypatch, with_plane=True)
    return a, b, [f"--job={lab.job}", *a.location]


@full(proved_in="tests/integration/host/test_ray_workers.py", why="a partition, in the place of a power cut")
def test_host_that_was_cut_off_comes_back_without_what_it_had(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, job = two_hosts(lab, monkeypatch)
    a.run("train", "--detach", *job, "--rollout.engines=2", "--sft.max_steps=0")
    wait_for_engines(lab, 2, on_b=True)
    before = {process.pid for process in b.computes()}

    b.cut()
    wait_for_engines(lab, 2, on_b=False)
    b.heal()
    wait_until(lambda: lab.phase("b") == "ready", what="the return of b")
    wait_until(lambda: b.computes() and not before & {process.pid for process in b.computes()},
               what="another worker of Ray on b, without what was on the one before")
    a.run("scale", "4", *job)
    wait_for_engines(lab, 4, on_b=True)
    a.run("stop", lab.job, *a.location)
    wait_until(lambda: not b.computes() and not a.computes(), what="the end of Ray on both")


@full(proved_in="tests/integration/driver/test_parts_on_ray.py tests/unit/driver/test_host_selection.py",
      why="an external engine on another host than that of the run")
def test_external_engine_is_on_the_host_that_is_named_until_that_is_drained_or_lost(
        lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, job = two_hosts(lab, monkeypatch)
    a.run("train", "--detach", *job, "--rollout.engines=1", "--sft.max_steps=0")
    wait_until(b.computes, what="the worker of Ray on b")
    api = lab.api()

    def register(port: int) -> str:
        url = f"https://{b.address}:{port}"
        a.run("engines", "register", url, "--via=b", "--wait", *job)
        return url

    drained = register(1)
    [engine] = [e for e in records(lab) if e.external]
    assert (engine.host, engine.url) == (b.address, drained)
    a.run("drain", "b", "--within=300", "--wait", *a.location)
    assert registration(lab, drained).ended == "its host b is drained"
    assert not [e for e in records(lab) if e.external]
    for host, status in (("b", 409), ("c", 404)):
        with pytest.raises(RequestRefused) as refused:
            api.register_engine(drained, "rollout", via=host)
        assert refused.value.status == status

    a.run("uncordon", "b", *a.location)
    wait_until(lambda: lab.phase("b") == "ready", what="the return of b")
    lost = register(2)
    b.power_off()
    wait_until(lambda: registration(lab, lost).ended, what="the end of the registration")
    assert not [e for e in records(lab) if e.external]
    a.run("stop", lab.job, *a.location)


def registration(lab: Lab, url: str) -> ExternalEngine:
    with lab.etcd() as etcd:
        found = readable_one(etcd.get(Keys(lab.job).external_engine(url)), ExternalEngine)
        assert found is not None
        return found


def records(lab: Lab) -> list[Engine]:
    with lab.etcd() as etcd:
        return [e for e, _ in readable(etcd.range(Keys(lab.job).engines_prefix())[0], Engine)]


def test_engines_are_on_every_host_and_leave_the_one_that_is_lost_drained_or_cordoned(
        lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, job = two_hosts(lab, monkeypatch)

    a.run("train", "--detach", *job, "--rollout.engines=2", "--sft.max_steps=0")
    wait_for_engines(lab, 2, on_b=True)

    b.power_off()
    wait_for_engines(lab, 2, on_b=False)
    kept = set(engines(lab))
    b.power_on()
    b.join(lab.join_file)
    wait_until(b.computes, what="the worker of Ray on b")
    a.run("scale", "4", *job)
    wait_for_engines(lab, 4, on_b=True)

    a.run("drain", "b", "--within=300", "--wait", *a.location)
    assert lab.phase("b") == "left" and "b" not in engines(lab).values()
    assert not b.computes()
    wait_for_engines(lab, 4, on_b=False)

    a.run("uncordon", "b", *a.location)
    wait_until(b.computes, what="the worker of Ray on b")
    a.run("cordon", "b", *a.location)
    wait_until(lambda: lab.phase("b") == "cordoned", what="the cordon")
    a.run("scale", "6", *job)
    wait_for_engines(lab, 6, on_b=False)

    with lab.etcd() as etcd:
        assert fencing.current_epoch(etcd, Keys(lab.job)) == 1
    assert kept <= engines(lab).keys()
    a.run("stop", lab.job, *a.location)
    wait_until(lambda: not b.computes() and not a.computes(), what="the end of Ray on both")


@full(proved_in="tests/unit/driver/test_shared_gpus.py tests/integration/driver/test_shared_gpus_on_hosts.py",
      why="the GPUs of trainer and engines on the Ray of two hosts")
def test_ranks_and_engines_share_the_gpus_of_two_hosts_and_those_of_one_after_a_power_cut(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 1}')  # which each node of Ray counts; nothing looks for them
    with lab_of("ab", f"j-{secrets.token_hex(3)}") as lab:
        lab.start(*SETTINGS)
        a, b, job = two_hosts(lab, monkeypatch)
        a.run("train", "--detach", *job, "--placement=colocated", "--rollout.engines=2", "--sft.max_steps=0",
              "--trainer.data_parallel=2", "--trainer.min_data_parallel=1")
        wait_until(lambda: shared(lab) == (1, {"a": 1, "b": 1}, ["a", "b"]), what="ranks and engines on both hosts")
        [driver] = a.running("plane_driver")
        driver.kill()
        wait_until(lambda: a.running("plane_driver") not in ([], [driver]), what="the next driver")
        a.run("scale", "1", *job)
        wait_until(lambda: len(engines(lab)) == 1, what="the end of an engine")
        a.run("scale", "2", *job)
        wait_until(lambda: shared(lab) == (1, {"a": 1, "b": 1}, ["a", "b"]), what="another engine on the GPU it had")

        b.power_off()
        wait_until(lambda: shared(lab) == (2, {"a": 1}, ["a"]), what="another epoch, on one host")
        wait_until(lambda: "no GPU of the trainer is without an engine" in message(lab), what="the reason")
        a.run("stop", lab.job, *a.location)


def shared(lab: Lab) -> tuple[int, dict[str, int], list[str]]:
    """The epoch, the ranks of each host in it, and the hosts of the engines."""
    keys = Keys(lab.job)
    with lab.etcd() as etcd:
        epoch, found = fencing.current_epoch(etcd, keys), readable_one(etcd.get(keys.formation("trainer")), Formation)
    return epoch, found.ranks() if found and found.epoch == epoch else {}, sorted(engines(lab).values())
