"""Silences, which hold back the notifications of some alerts. A silenced alert is listed with the silence's id."""

from __future__ import annotations

import secrets
import time

from elastic_rl.coordinator.api_paths import job_path
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.leader_transaction import IdempotencyClaim, LeaderTransaction
from elastic_rl.coordinator.problems import Problem, concurrent_modification, not_found
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Silence

MAX_SILENCES = 200
LONGEST_S = 30 * 86400.0
_TEXT = 500


def create_silence(etcd: EtcdClient, keys: Keys, election: Election, *, duration_s: float, kind: str = "*",
                   subject: str = "*", by: str = "", comment: str = "", claim: IdempotencyClaim | None = None,
                   dry_run: bool = False) -> Silence:
    """Silences the alerts whose kind and subject match, for ``duration_s`` seconds. Needs the leadership.

    Raises problems: 422 for an invalid pattern or duration; 409 when there are too many silences; 503 and 504 as every
    write.
    """
    _check(duration_s, kind, subject, comment)
    now = time.time()
    silence = Silence(id=f"s-{int(now * 1000):013d}-{secrets.token_hex(3)}", kind=kind, subject=subject,
                      created_at=now, until=now + duration_s, by=by, comment=comment)
    if etcd.count(keys.silences_prefix()) >= MAX_SILENCES:
        raise Problem(409, "conflict", "There are too many silences", f"at most {MAX_SILENCES}; delete some first")
    if dry_run:
        return silence
    key = keys.silence(silence.id)
    message = f"alerts {kind} of {subject} are silenced for {duration_s:.0f} s" + (f" by {by}" if by else "")
    event = events.build(event_kinds.ALERTS_SILENCED, silence.id, message, by=by, until=silence.until)
    change = LeaderTransaction.with_event(keys, event, [Compare.absent(key)], [Op.put(key, silence.encode())])
    if not change.commit(etcd, election.writer, claim, job_path(keys.job, "silences", silence.id)):
        raise concurrent_modification()
    return silence


def delete_silence(etcd: EtcdClient, keys: Keys, election: Election, silence_id: str, *, by: str = "",
                   dry_run: bool = False) -> None:
    """Ends a silence; receivers are then notified of the alerts that still fire. Needs the leadership. Raises problems:
    404, 503, 504."""
    key = keys.silence(silence_id)
    if etcd.get(key) is None:
        raise not_found("silence", silence_id)
    if dry_run:
        return
    message = f"silence {silence_id} was ended" + (f" by {by}" if by else "")
    event = events.build(event_kinds.ALERTS_UNSILENCED, silence_id, message, by=by)
    change = LeaderTransaction.with_event(keys, event, [Compare.exists(key)], [Op.delete(key)])
    if not change.commit(etcd, election.writer):
        raise not_found("silence", silence_id)


def _check(duration_s: float, kind: str, subject: str, comment: str) -> None:
    faults = []
    if not 0 < duration_s <= LONGEST_S:
        faults.append(("/duration_s", f"between 0 and {LONGEST_S:.0f} seconds"))
    for name, text in (("/kind", kind), ("/subject", subject)):
        if not 0 < len(text) <= _TEXT:
            faults.append((name, f"1 to {_TEXT} characters; * stands for anything"))
    if len(comment) > _TEXT:
        faults.append(("/comment", f"at most {_TEXT} characters"))
    if faults:
        raise Problem(422, "invalid", "The request is not valid", "; ".join(f"{p}: {d}" for p, d in faults),
                      errors=[{"pointer": p, "detail": d} for p, d in faults])
