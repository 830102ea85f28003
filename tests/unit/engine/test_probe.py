"""A probe asks the scheduler only where the load does not show that it works."""

from __future__ import annotations

import httpx
import pytest

from elastic_rl.engine.server.probe import Load, ServerProbe, parse_load


class Sglang:
    """Answers as SGLang does. ``frozen``: the scheduler, while the HTTP process still reads the load that it left."""

    def __init__(self) -> None:
        self.running, self.waiting, self.tokens, self.frozen, self.asked = 0, 0, 0, False, list[str]()
        self.probe = ServerProbe(lambda: "http://engine", timeout_s=1.0)
        self.probe.http = httpx.Client(transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        if request.url.path == "/v1/loads":
            return httpx.Response(200, json={"loads": [{
                "num_running_reqs": self.running, "num_waiting_reqs": self.waiting, "num_used_tokens": self.tokens,
                "timestamp": len(self.asked)}]})
        if self.frozen:
            raise httpx.ReadTimeout("frozen")
        return httpx.Response(200)


def test_idle_engine_is_asked_for_a_token() -> None:
    sglang = Sglang()
    assert sglang.probe.sign_of_life() and sglang.asked == ["/v1/loads", "/health_generate"]
    sglang.frozen = True
    assert not sglang.probe.sign_of_life()


def test_busy_engine_whose_load_moves_is_not_asked() -> None:
    sglang = Sglang()
    sglang.running, sglang.waiting = 256, 1000
    assert sglang.probe.sign_of_life()  # nothing to compare with yet
    sglang.asked.clear()
    sglang.frozen = True  # it would not answer: its queue is full
    for sglang.tokens in range(100, 1000, 100):
        assert sglang.probe.sign_of_life()
    assert set(sglang.asked) == {"/v1/loads"} and sglang.probe.load.in_flight == 1256


def test_engine_that_finished_its_requests_since_the_last_probe_is_not_asked() -> None:
    sglang = Sglang()
    sglang.running = 3
    assert sglang.probe.sign_of_life()
    sglang.running, sglang.frozen = 0, True
    assert sglang.probe.sign_of_life() and not sglang.probe.sign_of_life(), "frozen since: found by the next probe"


def test_busy_engine_whose_load_stands_still_is_asked() -> None:
    sglang = Sglang()
    sglang.running = 3
    assert sglang.probe.sign_of_life() and sglang.probe.sign_of_life()
    sglang.frozen = True
    assert not sglang.probe.sign_of_life(), "a load that only has another time is no progress"


@pytest.mark.parametrize("answer", [
    httpx.Response(500), httpx.Response(200, text="<html>"), httpx.Response(200, json={}),
    httpx.Response(200, json={"loads": [None]}), httpx.Response(200, json=[])])
def test_answer_that_is_no_load_is_no_sign_of_life(answer: httpx.Response) -> None:
    probe = ServerProbe(lambda: "http://engine", timeout_s=1.0)
    probe.http = httpx.Client(transport=httpx.MockTransport(
        lambda request: answer if request.url.path == "/v1/loads" else httpx.Response(503)))
    assert not probe.sign_of_life() and probe.load is None


def test_load_is_summed_over_the_ranks() -> None:
    rank = {"num_running_reqs": 2, "num_waiting_reqs": 3}
    load = parse_load({"loads": [rank, rank]})
    assert (load.running, load.waiting, load.in_flight) == (4, 6, 10) and Load().in_flight == 0


def test_share_of_the_kv_cache_is_over_all_ranks_and_unknown_without_a_size() -> None:
    rank = {"num_running_reqs": 2, "num_waiting_reqs": 3}
    used = [{**rank, "num_used_tokens": n, "max_total_num_tokens": 100} for n in (20, 60)]
    assert parse_load({"loads": used}).token_usage == 0.4
    assert parse_load({"loads": [{**rank, "num_used_tokens": 7, "max_total_num_tokens": 0}]}).token_usage is None
    assert parse_load({"loads": [rank]}).token_usage is None
    assert parse_load({"loads": [{**rank, "num_used_tokens": 150, "max_total_num_tokens": 100}]}).token_usage == 1.0
