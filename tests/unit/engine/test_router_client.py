"""The client of the router's worker list, against a router that answers as the real one does and forgets a removal."""

from __future__ import annotations

import httpx
import pytest

from elastic_rl.engine import router as router_module
from elastic_rl.engine.router import RouterClient
from elastic_rl.errors import DeadlineExceeded, RouterUnavailable
from elastic_rl.net import http_client

ENGINE = "http://127.0.0.1:7"


class ForgetfulRouter:
    """Accepts every removal and carries out all but the first ``forgets`` of them."""

    def __init__(self, forgets: int) -> None:
        self.forgets = forgets
        self.failures: list[httpx.HTTPError] = []
        """What the next calls raise."""
        self.asked: list[str] = []
        self.workers = {"w1": ENGINE, "w2": "http://127.0.0.1:8"}

    def request(self, method: str, url: str, **_: object) -> httpx.Response:
        if self.failures:
            raise self.failures.pop()
        path = httpx.URL(url).path
        if method == "DELETE":
            self.asked.append(path)
            if len(self.asked) > self.forgets:
                self.workers.pop(path.rpartition("/")[2], None)
            return httpx.Response(202, json={"status": "accepted"})
        return httpx.Response(200, json={"workers": [
            {"id": worker, "url": url, "is_healthy": True} for worker, url in self.workers.items()]})


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ForgetfulRouter:
    router = ForgetfulRouter(request.param)
    monkeypatch.setattr(http_client, "request", router.request)
    monkeypatch.setattr(router_module, "_TRY_AGAIN_S", 0.001)
    return router


@pytest.mark.parametrize("router", [1], indirect=True)
def test_removal_that_the_router_forgot_is_asked_for_again(router: ForgetfulRouter) -> None:
    RouterClient("http://router").remove(ENGINE, timeout_s=30.0)
    assert router.asked == ["/workers/w1"] * 2 and list(router.workers) == ["w2"]
    RouterClient("http://router").remove(ENGINE, timeout_s=30.0)  # idempotent
    assert len(router.asked) == 2


@pytest.mark.parametrize("router", [1000], indirect=True)
def test_worker_that_stays_in_the_list_is_an_error_in_the_end(router: ForgetfulRouter) -> None:
    with pytest.raises(DeadlineExceeded, match=ENGINE):
        RouterClient("http://router").remove(ENGINE, timeout_s=0.1)
    assert len(router.asked) == 1, "not more often than once a second"


@pytest.mark.parametrize("router", [0], indirect=True)
def test_call_that_misses_the_router_is_tried_a_few_times(router: ForgetfulRouter) -> None:
    router.failures = [httpx.ConnectError("away"), httpx.ReadTimeout("slow")]
    assert RouterClient("http://router").workers()[ENGINE]
    router.failures = [httpx.ConnectError("away") for _ in range(10)]
    with pytest.raises(RouterUnavailable, match="ConnectError"):
        RouterClient("http://router").workers()
    assert len(router.failures) == 7, "bounded"


@pytest.mark.parametrize("reply", [httpx.Response(503, text="busy"), httpx.Response(200, text="<html>")])
def test_router_that_refuses_or_is_none_is_unavailable(monkeypatch: pytest.MonkeyPatch, reply: httpx.Response) -> None:
    monkeypatch.setattr(http_client, "request", lambda *_, **__: reply)
    with pytest.raises(RouterUnavailable):
        RouterClient("http://router").add(ENGINE, timeout_s=1.0)


def test_router_with_another_key_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "request", lambda *_, **__: httpx.Response(401, text="Unauthorized"))
    with pytest.raises(RouterUnavailable, match="401") as refused:
        RouterClient("http://router").workers()
    assert "elastic-rl restart job" in refused.value.hint
