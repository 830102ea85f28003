"""What the observer did not see, since it was compacted, is a gap; and what there is at the end of it is seen."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

from support.etcd_server import EtcdServers
from support.waiting import wait_until

from chaos_tests.observation import Observer
from elastic_rl.etcd.client import Op

MANY = 1203
"""More keys than are read at once."""


def test_keys_at_the_end_of_a_gap_are_shown_and_then_what_follows(tmp_path: Path) -> None:
    """In an etcd of its own: others read the history of the one that they share from its begin."""
    root, seen, listed = "/gap/", list[tuple[str, Any]](), threading.Event()

    def present(found: dict[str, Any]) -> None:
        seen.append(("present", found))
        if "listed" in found:
            listed.set()

    with closing(EtcdServers(tmp_path / "etcd", 1)) as servers, servers.start().connect() as etcd:
        first = etcd.put(f"{root}deleted", b"a")
        etcd.put(f"{root}long", b"x" * (65 << 10))
        for begin in range(0, MANY, 100):
            etcd.txn([], [Op.put(f"{root}k{n:04}", b"1") for n in range(begin, min(MANY, begin + 100))])
        etcd.delete(f"{root}deleted")
        last = etcd.put(f"{root}k0000", b"2")
        etcd.compact(last)
        observer = Observer(servers.endpoints, root, first, lambda change: seen.append(("change", change)),
                            log=tmp_path / "observer.log", on_gap=lambda *of: seen.append(("gap", of)),
                            on_present=present)
        try:
            wait_until(listed.is_set, what="the keys after the gap")
            after = etcd.put(f"{root}k0001", b"3")
            observer.await_revision(after)
            wait_until(lambda: seen[-1][0] == "change", what="the change")
        finally:
            observer.close()
    assert [kind for kind, _ in seen] == ["gap", *["present"] * (MANY + 2), "change"]
    assert seen[0][1] == (first, last) and seen[-2][1] == {"listed": last}
    shown = {found["key"].removeprefix(root): found for _, found in seen[1:-2]}
    assert shown.keys() == {"long", *(f"k{n:04}" for n in range(MANY))}
    assert (shown["k0000"]["value"], shown["k0000"]["revision"], shown["k0001"]["value"]) == ("2", last, "1")
    assert shown["long"]["omitted_bytes"] == 65 << 10 and shown["long"]["value"] == ""
    assert (seen[-1][1]["key"], seen[-1][1]["revision"]) == (f"{root}k0001", after)
