"""Client of a trainer group: finds rank 0 through etcd and sends it commands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from elastic_rl import http_client
from elastic_rl.errors import ConfigError, TrainerFailed
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Member
from elastic_rl.trainer.batch import TrainBatch

_POLL_S = 0.1
_SAME_GROUP_AFTER_S = 10.0
"""A group that lost a rank has ended well within this."""


@dataclass(frozen=True)
class TrainerStatus:
    """State of a trainer group."""

    incarnation: str
    """Random; new each time that the group forms."""
    step: int
    phase: str
    """``sft`` or ``rl``."""
    policy_version: int
    state_version: int
    restarts: int
    cursor: dict[str, Any]


class TrainerClient:
    """Sends commands to rank 0. Every wait is bounded; any loss of the group raises TrainerFailed."""

    def __init__(self, etcd: EtcdClient, keys: Keys, *, step_timeout_s: float, start_timeout_s: float) -> None:
        self._etcd, self._keys = etcd, keys
        self._step_timeout_s, self._start_timeout_s = step_timeout_s, start_timeout_s
        self._http = http_client.client(timeout=httpx.Timeout(5.0))
        self._url = ""
        self._incarnation = ""

    def close(self) -> None:
        self._http.close()

    def wait_ready(self, *, not_incarnation: str = "") -> TrainerStatus:
        """Waits for a group, other than ``not_incarnation``, that has restored or initialised its weights.

        If that incarnation still works some time later, only an answer was lost and no rank: then its status is
        returned. Raises TrainerFailed after ``start_timeout_s``.
        """
        began = time.monotonic()
        while True:
            status, works = self._read_status(since=began)
            waited_s = time.monotonic() - began
            if status is not None and (
                    status.incarnation != not_incarnation or (works and waited_s > _SAME_GROUP_AFTER_S)):
                self._incarnation = status.incarnation
                return status
            if waited_s > self._start_timeout_s:
                raise TrainerFailed(f"no trainer group was ready within {self._start_timeout_s:g} s",
                                    hint="the trainer's log says why")
            time.sleep(_POLL_S)

    def sft(self, on_progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Runs or continues the SFT phase to its end and returns ``{"steps", "eval_accuracy", "loss"}``.

        ``on_progress`` gets ``{"step", "loss", "eval_accuracy", "at"}`` at each evaluation. Returns at once when the
        phase is over. Raises TrainerFailed when the group is lost or makes no progress for ``step_timeout_s``.
        """
        self._request("POST", "/sft", timeout_s=5.0)
        seen, progress_at = 0, time.monotonic()
        while True:
            answer = self._request("GET", f"/sft?since={seen}", timeout_s=5.0)
            for record in answer["records"]:
                on_progress(record)
            if answer["result"]:
                return answer["result"]
            if answer["records"]:
                seen, progress_at = answer["next"], time.monotonic()
            elif time.monotonic() - progress_at > self._step_timeout_s:
                raise TrainerFailed(f"the SFT phase made no progress for {self._step_timeout_s:g} s")
            self._check_incarnation()
            time.sleep(_POLL_S)

    def train(self, step: int, batch: TrainBatch, *, cursor: dict[str, Any] | None = None) -> dict[str, Any]:
        """Runs RL step ``step`` (the trainer's step + 1) and returns its metrics once its policy is published.

        Keys: loss, grad_norm, lr, logprob_diff_max, logprob_diff_mean, clip_fraction, kl, ratio_mean, tokens, train_s,
        gather_s, publish_stall_s (seconds), policy_version, state_version (0 when no state was saved). ``cursor`` is
        saved with the state and returned by ``wait_ready``. Raises TrainerFailed when the group is lost, hangs, or is
        at another step; ConfigError when the batch is refused.
        """
        body = batch.check().to_bytes(step=step, cursor=cursor or {})
        return self._request("POST", "/train", body, timeout_s=self._step_timeout_s)

    def _member(self) -> Member | None:
        kv = self._etcd.get(self._keys.member("trainer", "rank-0"))
        return readable_one(kv, Member)

    def _read_status(self, *, since: float) -> tuple[TrainerStatus | None, bool]:
        """The status if the group is ready, and whether all its ranks took a command after ``since`` (monotonic)."""
        member = self._member()
        if member is None or not member.url:
            return None, False
        try:
            answer = self._http.get(member.url + "/status").json()
        except (httpx.HTTPError, ValueError):
            return None, False  # the member's record outlives a killed rank by the lease
        if not answer.get("ready") or answer["incarnation"] != member.incarnation:
            return None, False
        self._url = member.url
        works = time.monotonic() - float(answer["heartbeat_age_s"]) > since
        return TrainerStatus(**{name: answer[name] for name in TrainerStatus.__dataclass_fields__}), works

    def _check_incarnation(self) -> None:
        member = self._member()
        if member is not None and member.incarnation != self._incarnation:
            raise TrainerFailed("the trainer group re-formed")

    def _request(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> dict[str, Any]:
        if not self._url:
            self.wait_ready()
        try:
            answer = self._http.request(method, self._url + path, content=body, timeout=timeout_s)
            value: dict[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError) as e:
            raise TrainerFailed(f"the trainer did not answer {path}: {type(e).__name__} {e}".strip()) from e
        if answer.status_code == 400:
            raise ConfigError(f"the trainer refused the batch: {value['error']}")
        if answer.status_code >= 300:
            raise TrainerFailed(f"the trainer refused {path}: {value.get('error', answer.status_code)}")
        return value
