"""Retention: which versions of a stream are kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.catalog.retention import RetentionPolicy, durable_to_drop, to_release
from elastic_rl.etcd.records import Version, VersionState

NOW = 1_000_000.0


@st.composite
def streams(draw: st.DrawFn) -> list[Version]:
    ages = sorted(draw(st.lists(st.floats(0, 1000), max_size=12)), reverse=True)
    return [Version(stream="policy", number=i + 1, state=VersionState.COMMITTED, epoch=1, committed_at=NOW - age,
                    nbytes=draw(st.integers(0, 100))) for i, age in enumerate(ages)]


keeps = st.builds(RetentionPolicy, versions=st.integers(1, 6), age_s=st.sampled_from([0.0, 1.0, 500.0]),
                  nbytes=st.sampled_from([0, 1, 150]))


@given(streams(), st.sets(st.integers(1, 12)), keeps)
def test_release_spares_head_and_pinned_and_keeps_others_within_limits(versions, pinned, keep) -> None:
    gone = to_release(versions, keep, NOW, pinned=pinned)
    assert gone == sorted(set(gone))
    left = [v for v in versions if v.number not in gone]
    assert not versions or left[-1] is versions[-1]
    assert pinned & {v.number for v in versions} <= {v.number for v in left}
    loose = [v for v in left[:-1] if v.number not in pinned]
    assert len(loose) + bool(versions) <= max(keep.versions, 1) or not loose
    assert not keep.age_s or all(NOW - v.committed_at <= keep.age_s for v in loose)
    assert not keep.nbytes or not loose or sum(v.nbytes for v in [*loose, versions[-1]]) <= keep.nbytes


@given(streams(), keeps)
def test_release_by_number_keeps_the_newest(versions, keep) -> None:
    plain = RetentionPolicy(keep.versions)
    assert to_release(versions, plain, NOW) == [v.number for v in versions[:-keep.versions]]


@given(streams(), st.sets(st.integers(1, 12)), keeps)
def test_release_is_idempotent(versions, pinned, keep) -> None:
    gone = set(to_release(versions, keep, NOW, pinned=pinned))
    left = [v for v in versions if v.number not in gone]
    assert to_release(left, keep, NOW, pinned=pinned) == []


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 5), st.sets(st.integers(0, 30), max_size=4))
def test_durable_drop_keeps_what_is_needed_and_anchors_of_kept_versions(is_anchor, keep, needed) -> None:
    anchors, last = {}, 1
    for number, anchor in enumerate(is_anchor, 1):
        last = number if anchor or number == 1 else last
        anchors[number] = last
    gone = set(durable_to_drop(anchors, keep, needed))
    left = {n: a for n, a in anchors.items() if n not in gone}
    assert set(left.values()) <= set(left)
    assert set(sorted(anchors)[-keep:]) <= set(left)
    assert needed & anchors.keys() <= set(left)
    assert len(left) <= 2 * (keep + len(needed))
