"""Keys of the prefix cache. ``tests/integration/engine/test_engine.py`` sees them in a real scheduler."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.engine.sglang import cache_keys
from elastic_rl.engine.sglang.cache_keys import of_version

versions = st.one_of(st.just("default"), st.integers(0, 1 << 40).map(str))
given_keys = st.one_of(st.none(), st.text(max_size=8), st.just("lora|7"))


@given(given_keys, given_keys, versions, versions)
def test_key_is_of_the_version_and_of_what_the_sender_gave(one: str | None, other: str | None, old: str, new: str
                                                           ) -> None:
    assert of_version(of_version(one, old), new) == of_version(one, new), "a request that waits over an update"
    assert (of_version(one, old) == of_version(other, new)) is (((one or ""), old) == ((other or ""), new))


def test_requests_that_wait_over_an_update_or_were_retracted_get_the_key_of_the_new_version() -> None:
    serving = SimpleNamespace(weight_version="5")

    class Scheduler:
        def __init__(self) -> None:
            self.waiting_queue: list[SimpleNamespace] = []

        def _add_request_to_queue(self, req: SimpleNamespace, is_retracted: bool = False) -> None:
            self.waiting_queue.append(req)

        def record_weight_version_change(self, new_version: str) -> None:
            serving.weight_version = new_version

    cache_keys.install(Scheduler, lambda: serving.weight_version)
    scheduler, waiting, running = Scheduler(), SimpleNamespace(extra_key=None), SimpleNamespace(extra_key="a")
    for request in (running, waiting):
        scheduler._add_request_to_queue(request)
    scheduler.waiting_queue.remove(running)
    scheduler.record_weight_version_change("6")
    assert waiting.extra_key == of_version(None, "6")
    assert running.extra_key == of_version("a", "5"), "it keeps what it has computed, and no later one takes it"
    scheduler._add_request_to_queue(running, is_retracted=True)
    assert running.extra_key == of_version("a", "6")
