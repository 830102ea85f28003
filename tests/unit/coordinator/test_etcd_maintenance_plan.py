"""When etcd's history is shortened and which members are defragmented, without an etcd."""

from __future__ import annotations

import pytest

from elastic_rl.coordinator.etcd_maintenance import NO_SPACE, in_use, kept_history_s, to_defragment
from elastic_rl.etcd import member_metrics
from elastic_rl.etcd.client import MemberStatus


def member(name: str, size: int, used: int, *, quota: int = 1000, leads: bool = False, full: bool = False,
           error: str = "") -> MemberStatus:
    return MemberStatus(name, db_bytes=size, db_in_use_bytes=used, quota_bytes=quota, is_leader=leads, error=error,
                        alarms=(NO_SPACE,) if full else ())


def test_history_is_shortened_once_half_of_the_quota_is_in_use() -> None:
    members = [member("a", 900, 300), member("b", 900, 499)]
    assert kept_history_s(300.0, in_use(members, 1000)) == 300.0
    crowded = [*members, member("c", 900, 500, quota=0)]
    assert kept_history_s(300.0, in_use(crowded, 1000)) == 30.0 and kept_history_s(300.0, in_use(crowded, 2000)) == 300
    assert kept_history_s(5.0, 0.9) == 5.0
    assert in_use([], 1000) == 0.0


@pytest.mark.parametrize(("members", "expected"), [
    ([member("a", 790, 10)], []),  # far from its quota
    ([member("a", 900, 460)], []),  # not mostly free
    ([member("a", 900, 440)], ["a"]),
    ([member("a", 900, 10, leads=True), member("b", 900, 10), member("c", 100, 10)], ["b", "a"]),
    ([member("a", 900, 10), member("b", 0, 0, error="x")], []),  # not while another one is away
    ([member("a", 900 << 20, 65 << 20, quota=1000 << 20)], []),  # its silence would end leases
    ([member("a", 999 << 20, 65 << 20, quota=1000 << 20, full=True)], ["a"]),
    ([member("a", 1000, 700, full=True), member("b", 0, 0, error="x")], ["a"]),  # nothing is written anyway
    ([member("a", 1000, 1000, full=True)], ["a"]),  # what a compaction freed counts as in use until the next write
    ([member("a", 300, 100, full=True)], []),  # only the alarm is left to be ended
    ([member("a", 1000, 100, full=True, quota=0)], ["a"]),
])
def test_plan_defragments_members_where_it_helps_and_the_leader_last(members: list[MemberStatus],
                                                                     expected: list[str]) -> None:
    assert [m.endpoint for m in to_defragment(members, 1000)] == expected


def test_metrics_page_is_parsed_for_quota_and_compaction() -> None:
    page = ("# HELP etcd_server_quota_backend_bytes Current backend storage quota size in bytes.\n"
            "etcd_server_quota_backend_bytes 2.147483648e+09\n"
            "etcd_debugging_mvcc_compact_revision -1\netcd_debugging_mvcc_current_revision 17\n"
            'etcd_other{le="1"} 5\nmalformed\n')
    assert member_metrics.parse(page) == member_metrics.MemberMetrics(2 << 30, 17, 0)
    assert member_metrics.parse("etcd_server_quota_backend_bytes NaN\n") == member_metrics.MemberMetrics()
