"""The store by which ranks find each other listens on their address only: whoever reaches it may change it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from elastic_rl.net import torch_store
from elastic_rl.net.addresses import free_port
from elastic_rl.runtime.process import start_child

RANK = """
import os, psutil, torch, torch.distributed as dist
from elastic_rl.net import torch_store
torch_store.install()
dist.init_process_group("gloo")
store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
store.set(f"from-{rank}", str(rank))
got = store.get(f"from-{1 - rank}").decode()
total = torch.ones(1)
dist.all_reduce(total)
print(got, int(total), *{c.laddr.ip for c in psutil.Process().net_connections("tcp")
                         if c.status == "LISTEN" and c.laddr.port == int(os.environ["MASTER_PORT"])})
os._exit(1)
"""


@pytest.mark.parametrize(("host", "address"), [
    ("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "::1")])
def test_ranks_meet_at_a_store_that_listens_on_their_host_only(host: str, address: str) -> None:
    common = {**os.environ, "MASTER_ADDR": host, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    for _ in range(2):  # ranks that are started again may get the port of those that died
        ranks = [start_child([sys.executable, "-c", RANK], env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE)
                 for rank in range(2)]
        first, second = (rank.communicate(timeout=300)[0].decode().split() for rank in ranks)
        assert first == ["1", "2", address]
        assert second == ["0", "2"]


def test_store_of_a_name_or_of_another_machine_is_left_to_torch() -> None:
    for host in ("host.example", "198.51.100.1"):
        assert torch_store._listen(host, 0) is None


def test_second_store_of_a_process_shares_the_port_of_the_first() -> None:
    first = torch_store.bound_store("127.0.0.1", free_port(), is_master=True, world_size=1, multi_tenant=True)
    second = torch_store.bound_store("127.0.0.1", first.port, is_master=True, world_size=1, multi_tenant=True)
    first.set("a", "1")
    assert second.get("a") == b"1"
