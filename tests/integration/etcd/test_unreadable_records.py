"""Records that cannot be read, as processes other than the leader meet them: skipped, and logged once."""

from __future__ import annotations

import logging

import pytest

from elastic_rl.dcs.fetch.puller import HeadWatch
from elastic_rl.driver.restart_requests import open_requests
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import Member, RestartRequest, Version, VersionState


def test_unreadable_records_do_not_hide_the_others(etcd: EtcdClient, keys: Keys, caplog: pytest.LogCaptureFixture
                                                   ) -> None:
    request = RestartRequest(target="roles/actor", generation=1)
    member = Member(role="actor", id="a", pid=1, host="h", incarnation="i")
    for key, value in ((keys.restart("roles/actor"), request.encode()), (keys.restart("roles/critic"), b"garbage"),
                       (keys.member("actor", "a"), member.encode()), (keys.member("actor", "b"), b'{"role": 7}')):
        etcd.put(key, value)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert open_requests(etcd, keys) == {"roles/actor": request}
            assert members(etcd, keys, "actor") == [member]
    assert [sum(key in r.getMessage() for r in caplog.records)
            for key in (keys.restart("roles/critic"), keys.member("actor", "b"))] == [1, 1]


def test_head_that_cannot_be_read_is_skipped(etcd: EtcdClient, keys: Keys) -> None:
    key = keys.stream_head("policy")
    etcd.put(key, b'{"stream": "policy", "number": 1, "state": "mirrored"}')
    heads = HeadWatch(etcd, keys, "policy")
    try:
        assert heads.get(0.5) is None
        etcd.put(key, b"garbage")
        assert heads.get(0.5) is None
        etcd.put(key, Version(stream="policy", number=2, state=VersionState.COMMITTED, epoch=1).encode())
        found = heads.get(30.0)
        assert found is not None and found.number == 2
    finally:
        heads.close()
