"""ETags of what operators change."""

from __future__ import annotations

import pytest

from elastic_rl.coordinator import etags
from elastic_rl.coordinator.problems import Problem


@pytest.mark.parametrize(("header", "revision"), [('"12"', 12), ("12", 12), ('W/"12"', 12), ("*", None)])
def test_etag_is_the_revision_of_the_spec(header: str, revision: int | None) -> None:
    assert etags.parse_if_match(header, "pool") == revision
    assert revision is None or etags.parse_if_match(etags.etag(revision), "pool") == revision


@pytest.mark.parametrize(("header", "status"), [(None, 428), (" ", 428), ('"abc"', 412), ('"-3"', 412)])
def test_missing_if_match_is_428_and_foreign_etag_412(header: str | None, status: int) -> None:
    with pytest.raises(Problem) as e:
        etags.parse_if_match(header, "pool")
    assert e.value.status == status


def test_change_of_another_revision_is_412_and_names_the_present_etag() -> None:
    etags.check_revision(7, None, "host")
    etags.check_revision(7, 7, "host")
    with pytest.raises(Problem, match="its ETag is \"7\" now, not \"6\"") as e:
        etags.check_revision(7, 6, "host")
    assert (e.value.status, e.value.headers) == (412, {"ETag": '"7"'})
