"""Client of a trainer group: finds rank 0 through etcd, sends shares of batches and commands, and waits for results.

A command may take as long as it takes: the client asks again and again, and says what it waits for and how long. A
refusal ends the wait, and so does another group in the place of this one; a group that is only silent does not.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from elastic_rl.config import TrainerConfig
from elastic_rl.config.groups import ACTOR, TrainerGroupSpec
from elastic_rl.data.batch import Batch
from elastic_rl.data.branch import Branch
from elastic_rl.data.ledger import ConsumedGroups
from elastic_rl.dcs.security import Security
from elastic_rl.errors import (
    ConfigError,
    Conflict,
    EtcdUnavailable,
    GroupReformed,
    GroupsLost,
    StaleSamples,
    StepRefused,
    TrainerFailed,
)
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Member
from elastic_rl.models.flops import SequenceCost
from elastic_rl.net import http_client
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.trainer.progress import Phase
from elastic_rl.trainer.service.calls import Executed, TrainerCalls, Uploaded
from elastic_rl.trainer.service.commands import REFUSALS, Command, ForwardCommand

_POLL_S = 0.1
_REQUEST_S = 10.0
"""Limit of one request; for a share, plus a second for each ``_SLOW_BYTES_PER_S``."""
_SLOW_BYTES_PER_S = 4 << 20
_QUEUE_S = 60.0
"""More for a share that the rank reads from the queue, whose own limits end it earlier."""
_WAIT_S = 2.0
"""How long one request waits for a result on the other side. Short, so that a stopped trainer is noticed."""
_SHARE_THREADS = 8
_SHARE_PIECE_BYTES = TrainerConfig().share_piece_bytes
_OUTPUT_ATTEMPTS, _OUTPUT_RETRY_S = 6, (0.2, 4.0)
_UPLOAD_RETRY_S = (_POLL_S, 2.0)
"""First and longest pause before shares are sent again, which may be large."""


@dataclass(frozen=True)
class TrainerStatus:
    """State of a trainer group."""

    group: str
    """Random; new each time that the group forms."""
    step: int
    phase: Phase
    policy_version: int
    state_version: int
    restarts: int
    cursor: dict[str, Any]
    consumed: ConsumedGroups
    pair: str
    """Name of the state; see ``Progress.pair``."""
    branch: Branch
    """Which versions are of the weights that it has."""
    share_urls: tuple[str, ...]
    """Where the shares of a batch go, by data-parallel rank."""
    minibatches: int
    """Number of minibatches of a step, over each of which shares are balanced."""
    cost: SequenceCost
    """Operations of the group's model, by which shares are balanced."""
    reference_version: int
    """See ``Progress``."""
    executing: str
    """The step that the group makes now, "" for none: what the rest says is of the state before it."""

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> TrainerStatus:
        return cls(group=raw["group"], step=int(raw["step"]), phase="rl" if raw["phase"] == "rl" else "sft",
                   policy_version=int(raw["policy_version"]), state_version=int(raw["state_version"]),
                   restarts=int(raw["restarts"]), cursor=dict(raw["cursor"]),
                   consumed=ConsumedGroups.from_json(raw["consumed"]), share_urls=tuple(raw["share_urls"]),
                   pair=str(raw["pair"]), branch=Branch.from_json(raw["branch"]),
                   minibatches=int(raw["minibatches"]),
                   cost=SequenceCost(linear=float(raw["cost"]["linear"]), square=float(raw["cost"]["square"])),
                   reference_version=int(raw["reference_version"]), executing=str(raw["executing"]))


@dataclass(frozen=True, eq=False)
class _Piece:
    """A piece of the share of a replica."""

    url: str
    rows: torch.Tensor
    """[n] int64: the samples of the batch that the piece has."""
    number: int
    of: int
    """Number of pieces of the share."""


class TrainerClient(TrainerCalls):
    """Client of one actor: every command carries its fencing token (epoch, term)."""

    def __init__(self, etcd: EtcdClient, keys: Keys, security: Security, *, epoch: int, term: int,
                 group: TrainerGroupSpec = ACTOR, on_wait: Callable[[str], None] = lambda text: None,
                 share_piece_bytes: int = _SHARE_PIECE_BYTES) -> None:
        """``on_wait`` is called again and again during a wait, with what is waited for; "" for a trainer that answers.
        It may raise, which ends the wait. ``share_piece_bytes``: what a rank takes as one message."""
        self._etcd, self._keys, self._epoch, self._term, self._on_wait = etcd, keys, epoch, term, on_wait
        self._role, self._piece_bytes = group.name, share_piece_bytes // 2  # the rest is for what is not tensors
        self._has_state = group.trains
        context = security.client_context
        self._http = http_client.client(
            timeout=_REQUEST_S, verify=context if context is not None else True,
            headers={"Authorization": f"Bearer {security.token}"} if security.token else {})
        self._threads = ThreadPoolExecutor(_SHARE_THREADS, "shares")
        self._url = ""
        self._group = ""
        """The formation of the group that this client has taken over."""
        self._shares: tuple[str, ...] = ()
        self._minibatches, self._cost = 1, SequenceCost(1.0, 0.0)
        self._waits_for = ""
        """What the trainer waits for, as of its last answer."""

    def close(self) -> None:
        self._threads.shutdown(wait=False)
        self._http.close()

    # -- state ------------------------------------------------------------------------------------------------------
    def wait_ready(self) -> TrainerStatus:
        """Waits, without end, for a group that has restored or initialised its weights, and takes it over: commands of
        earlier actors are refused from then on. A step that it makes for one of them is waited for, since its groups
        would be generated again. Raises Fenced, EtcdUnavailable and what ``on_wait`` raises."""
        began, claimed = time.monotonic(), ""
        while True:
            status, why = self._read_status()
            if status is not None and status.group != claimed:
                if self._claim():
                    claimed = status.group
                    continue  # what it executes now is the last command of an earlier actor
            elif status is not None and status.executing:
                why = f"the {self._role} to end the {status.executing} of the actor before"
            elif status is not None:
                self._group, self._shares = status.group, status.share_urls
                self._minibatches, self._cost = status.minibatches, status.cost
                self._on_wait("")
                return status
            self._on_wait(f"{why or f'the {self._role}'} ({time.monotonic() - began:.0f} s)")
            time.sleep(_POLL_S)

    def status(self) -> TrainerStatus | None:
        """The status of the group, which is not taken over; None while there is none that is ready."""
        return self._read_status()[0]

    def forget(self) -> None:
        """The next command goes to whichever group there is then, once it is ready."""
        self._group = ""

    def _claim(self) -> bool:
        try:
            answer = self._http.post(self._url + "/v1/claim", json={"epoch": self._epoch, "term": self._term})
        except httpx.HTTPError:
            return False
        return answer.status_code == httpx.codes.ACCEPTED

    def _read_status(self) -> tuple[TrainerStatus | None, str]:
        """The status if the group is ready, else what is missing."""
        member = self._member()
        if member is None or not member.url:
            return None, f"a group of ranks ({self._role}): none has formed"
        try:
            answer = self._http.get(member.url + "/v1/status", timeout=5.0)
            if answer.status_code == httpx.codes.FORBIDDEN:
                return None, f"a {self._role} that accepts this job's token"
            raw = _json(answer)
            if not raw.get("ready"):
                return None, f"the {self._role} to restore its state"
            if raw["group"] != member.incarnation or int(raw["epoch"]) != self._epoch:
                return None, f"the {self._role} group of this epoch"
            self._url = member.url
            return TrainerStatus.from_json(raw), ""
        except (httpx.HTTPError, _Unanswered, ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
            # The member's record outlives a killed rank by the lease.
            return None, f"the {self._role} to answer: {_name_of(e)}"

    def _member(self) -> Member | None:
        return readable_one(self._etcd.get(self._keys.member(self._role, "rank-0")), Member)

    # -- commands -----------------------------------------------------------------------------------------------------
    def upload(self, batch: Batch) -> Uploaded:
        """Sends the shares of a batch ahead of the update that needs them: a batch that the group does not take is
        refused before anything else has happened. Raises as ``update``."""
        if not self._group:
            self.wait_ready()
        return self._upload(batch, self._rows_of_shares(batch))

    def discard(self, uploaded: Uploaded) -> None:
        """No command will use these shares. A rank that does not answer keeps its own until a few others have come."""
        def delete(url: str) -> None:
            with contextlib.suppress(httpx.HTTPError):
                self._http.delete(f"{url}/v1/batches/{uploaded.batch}/share")

        list(self._threads.map(delete, self._shares))

    def execute(self, make: Callable[..., Command], batch: Batch | Uploaded | None = None) -> Executed:
        """See ``TrainerCalls``."""
        if not self._group:
            self.wait_ready()
        rows = self._rows_of_shares(batch) if isinstance(batch, Batch) else []
        uploaded = self._upload(batch, rows) if isinstance(batch, Batch) else batch
        command = make(id=self._new_id(), epoch=self._epoch, term=self._term,
                       **({"group": self._group} if uploaded is None else vars(uploaded)))
        try:
            result = self._await_result(command)
        except TrainerFailed as e:
            if (refusal := self._refusal_of(command)) is None:
                raise
            raise refusal from e
        if not isinstance(command, ForwardCommand):
            return Executed(result, {})
        assert isinstance(batch, Batch)
        outputs = list(self._threads.map(lambda url: self._output(url, command.id), self._shares))
        return Executed(result, {name: batch.joined(rows, [of_replica[name] for of_replica in outputs])
                                 for name in outputs[0]})

    def _refusal_of(self, command: Command) -> StepRefused | None:
        """Why the group has ended, if one of its ranks has left an event that the command did it. The event is older
        than the next formation."""
        try:
            found = events.recent(self._etcd, self._keys)
        except EtcdUnavailable:
            return None
        kind = event_kinds.TRAINER_GROUP_EVENTS[self._role].refused.name
        left = next((e for e in found if e.kind == kind and e.data.get("command") == command.id), None)
        if left is None:
            return None
        if not self._has_state:
            self.forget()  # another formation of it is as good
        return StepRefused(left.message, hint="lower trainer.micro_batch_tokens, or the length of responses",
                           went_back=self._has_state)

    def _rows_of_shares(self, batch: Batch) -> list[torch.Tensor]:
        return batch.share_rows(len(self._shares), self._minibatches, self._cost.of_sample)

    def _new_id(self) -> str:
        return f"{self._epoch}-{self._term}-{secrets.token_hex(8)}"

    def _upload(self, batch: Batch, rows: Sequence[torch.Tensor]) -> Uploaded:
        """``rows``: the number of rows of each replica's share."""
        uploaded, began = Uploaded(self._new_id(), self._group), time.monotonic()
        unsent, retry = list[_Piece](), RetryBackoff(*_UPLOAD_RETRY_S)
        for url, of_share in zip(self._shares, rows, strict=True):
            pieces = batch.pieces(of_share, self._piece_bytes)
            unsent += [_Piece(url, piece, number, len(pieces)) for number, piece in enumerate(pieces)]
        unsent.sort(key=lambda piece: piece.number)  # so that all ranks have something to read
        while unsent:
            try:
                self._send_shares(uploaded.batch, batch, unsent)
            except (ConfigError, GroupsLost):
                self.discard(uploaded)
                raise
            except (httpx.HTTPError, _Unanswered) as e:
                batch.require_stored()  # a rank cannot say more than that it cannot read them
                retry.failed(time.monotonic())
                self._await_answer(e, began, retry.left_s(time.monotonic()))
        return uploaded

    def _await_result(self, command: Command) -> dict[str, Any]:
        began, sent = time.monotonic(), False
        while True:
            try:
                if not sent:
                    if not self._post(command):
                        self.require_same_group()
                        self._on_wait(f"the {self._role} to take a command: it starts, or others wait")
                        time.sleep(_POLL_S)
                        continue
                    sent = True
                outcome = self._ask(command.id)
            except (httpx.HTTPError, _Unanswered) as e:
                self._await_answer(e, began)
                continue
            if outcome is None:
                self._on_wait(self._waits_for)
            elif isinstance(outcome.get("result"), dict):
                return dict(outcome["result"])
            elif outcome:
                raise _error_of(outcome)
            else:
                self.require_same_group()
                sent = False  # it is not known: it was lost before it was queued

    def _await_answer(self, error: Exception, began: float, pause_s: float = _POLL_S) -> None:
        """A pause after a request that was not answered, in which a group that has formed again is seen. Raises as
        ``require_same_group``."""
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0:
            self.require_same_group()
            self._on_wait(f"the {self._role} to answer ({_name_of(error)}, {time.monotonic() - began:.0f} s)")
            time.sleep(min(_POLL_S, left_s))

    def _send_shares(self, batch_id: str, batch: Batch, unsent: list[_Piece]) -> None:
        """Sends these pieces, and takes out of ``unsent`` what has arrived, so that another attempt sends only the
        rest. Raises what the first one met that failed; those that have not begun by then wait for the next
        attempt, so that a group that is away is noticed at once."""
        def put(piece: _Piece) -> None:
            share = batch.rows(piece.rows)
            body = share.to_bytes()  # made here: as many at a time as there are threads
            answer = self._http.put(
                f"{piece.url}/v1/batches/{batch_id}/share", params={"piece": piece.number, "pieces": piece.of},
                content=body, timeout=_REQUEST_S + (len(body) + share.elsewhere_bytes) / _SLOW_BYTES_PER_S + (
                    _QUEUE_S if share.elsewhere_bytes else 0.0))
            if answer.status_code == httpx.codes.GONE and (stored := batch.stored_groups):
                raise _loss(answer, stored)
            if answer.status_code != httpx.codes.CREATED:
                raise _refusal(answer)
            unsent.remove(piece)

        sending = [self._threads.submit(put, piece) for piece in list(unsent)]
        for late in wait(sending, return_when=FIRST_EXCEPTION).not_done:
            late.cancel()
        wait(sending)
        for sent in sending:
            if not sent.cancelled():
                sent.result()

    def _post(self, command: Command) -> bool:
        """Whether it was queued; not while the trainer starts, or too many others wait."""
        answer = self._http.post(self._url + "/v1/commands", content=command.encode())
        if answer.status_code == httpx.codes.CONFLICT:
            return False
        if answer.status_code != httpx.codes.ACCEPTED:
            raise _refusal(answer)
        return True

    def _ask(self, command_id: str) -> dict[str, Any] | None:
        """The outcome of a command; None while it is not done, {} when it is not known."""
        answer = self._http.get(f"{self._url}/v1/commands/{command_id}", params={"wait_s": _WAIT_S})
        if answer.status_code == httpx.codes.ACCEPTED:
            self._waits_for = str(_readable(answer).get("waits_for", ""))
            return None
        if answer.status_code == httpx.codes.NOT_FOUND:
            return {}
        if answer.status_code != httpx.codes.OK:
            raise _refusal(answer)
        outcome = _json(answer)
        if not isinstance(outcome.get("result"), dict) and not isinstance(outcome.get("error"), str):
            raise _Unanswered("HTTP 200 without an outcome")
        return outcome

    def _output(self, url: str, command_id: str) -> dict[str, torch.Tensor]:
        retry, failure = RetryBackoff(*_OUTPUT_RETRY_S), ""
        for _ in range(_OUTPUT_ATTEMPTS):
            try:
                answer = self._http.get(f"{url}/v1/outputs/{command_id}", timeout=60.0)
                if answer.status_code != httpx.codes.OK:
                    raise _refusal(answer)
                return load(answer.content)
            except (httpx.HTTPError, _Unanswered, SafetensorError, ValueError, KeyError) as e:
                failure = _name_of(e)
            self.require_same_group()
            retry.failed(time.monotonic())
            time.sleep(retry.left_s(time.monotonic()))
        raise TrainerFailed(f"a rank of the {self._role} did not give its outputs ({failure})")

    def require_same_group(self) -> None:
        """Raises GroupReformed when another group has formed than the one that this client has taken over. A group
        whose record is missing may only be slow: its lease has ended."""
        try:
            member = self._member()
        except EtcdUnavailable:  # nobody can say; the group may answer again
            return
        if member is not None and member.incarnation != self._group:
            raise GroupReformed(f"the {self._role} group re-formed")


class _Unanswered(Exception):
    """Something answered, but not the request: the service is overloaded or has a fault, or the answer is garbage, as
    of a proxy between. To be asked again."""


def _name_of(error: Exception) -> str:
    return str(error) if isinstance(error, _Unanswered) else type(error).__name__


def _json(answer: httpx.Response) -> dict[str, Any]:
    """Raises _Unanswered for anything but a JSON object."""
    try:
        body = answer.json()
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise _Unanswered(f"HTTP {answer.status_code} without a JSON object")
    return body


def _readable(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object, if it is one; else {}: the status code says enough."""
    try:
        return _json(answer)
    except _Unanswered:
        return {}


def _refusal(answer: httpx.Response) -> Exception:
    if not answer.is_client_error:
        return _Unanswered(f"HTTP {answer.status_code}")
    body = _readable(answer)
    message = str(body.get("error") or f"HTTP {answer.status_code}: {answer.text[:200]}")
    hint = str(body.get("hint", ""))
    if answer.status_code in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
        return ConfigError(f"the trainer refused the request: {message}", hint=hint)
    if answer.status_code == httpx.codes.CONFLICT:
        return Conflict(message, hint=hint)
    return TrainerFailed(f"the trainer refused the request: {message}", hint=hint)


def _loss(answer: httpx.Response, stored: Sequence[int]) -> GroupsLost:
    """``stored``: the groups of which some are lost. All of them, where the answer does not say which."""
    body = _readable(answer)
    told = body.get("groups")
    groups = [ordinal for ordinal in stored if ordinal in told] if isinstance(told, list) else []
    return GroupsLost(str(body.get("error") or "the queue has lost samples, and a rank does not say of which groups"),
                      groups or stored)


def _error_of(outcome: Mapping[str, Any]) -> Exception:
    kind = REFUSALS.get(str(outcome.get("error")), TrainerFailed)
    message, hint = str(outcome.get("message")), str(outcome.get("hint") or "")
    if kind is StaleSamples:
        found = outcome.get("versions")
        return StaleSamples(message, [v for v in found if isinstance(v, int)] if isinstance(found, list) else (),
                            hint=hint)
    if kind is StepRefused:
        return StepRefused(message, hint=hint, went_back=outcome.get("went_back") is True)
    return kind(message, hint=hint)
