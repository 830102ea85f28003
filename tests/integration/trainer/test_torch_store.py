"""The store by which ranks find each other listens on their address only: whoever reaches it may change it."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest
from support.tiers import parametrize

from elastic_rl.net import torch_store
from elastic_rl.net.addresses import free_port
from elastic_rl.runtime.process import start_child

RANKS = """
import os, psutil, torch, torch.distributed as dist
from elastic_rl.net import torch_store

def meet(rank):
    torch_store.install()
    dist.init_process_group("gloo", rank=rank)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"from-{rank}", str(rank))
    got = store.get(f"from-{1 - rank}").decode()
    total = torch.ones(1)
    dist.all_reduce(total)
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp")
                 if c.status == "LISTEN" and c.laddr.port == int(os.environ["MASTER_PORT"])}
    os.write(1, (" ".join(map(str, (rank, got, int(total), *listening))) + "\\n").encode())  # whole, unlike a print
    os._exit(1)

for _ in range(2):  # ranks that are started again may get the port of those that died
    for rank in range(2):
        if not os.fork():
            meet(rank)
    os.wait(), os.wait()
"""
HOSTS = [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "::1")]


@parametrize(("host", "address"), HOSTS, proved_in="tests/integration/trainer/test_torch_store.py",
             why="ranks at each further form of an address")
def test_ranks_meet_at_a_store_that_listens_on_their_host_only(host: str, address: str) -> None:
    env = {**os.environ, "MASTER_ADDR": host, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = start_child([sys.executable, "-c", RANKS], env=env, stdout=subprocess.PIPE)
    lines = sorted(ranks.communicate(timeout=300)[0].decode().splitlines())
    assert lines == [f"0 1 2 {address}"] * 2 + ["1 0 2"] * 2


@pytest.mark.parametrize(("host", "address"), HOSTS)
def test_store_listens_at_the_address_of_its_host_only(host: str, address: str) -> None:
    store = torch_store.bound_store(host, free_port(), is_master=True, world_size=1, multi_tenant=True)
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp")
                 if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port}
    assert listening == {address}


def test_store_of_a_name_or_of_another_machine_is_left_to_torch() -> None:
    for host in ("host.example", "198.51.100.1"):
        assert torch_store._listen(host, 0) is None


def test_second_store_of_a_process_shares_the_port_of_the_first() -> None:
    first = torch_store.bound_store("127.0.0.1", free_port(), is_master=True, world_size=1, multi_tenant=True)
    second = torch_store.bound_store("127.0.0.1", first.port, is_master=True, world_size=1, multi_tenant=True)
    first.set("a", "1")
    assert second.get("a") == b"1"
