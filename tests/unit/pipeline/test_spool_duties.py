"""What the thread of the spool does again and again."""

from __future__ import annotations

from elastic_rl.pipeline.records.spool import _Duty


def test_pauses_grow_although_what_comes_before_the_failure_succeeds_each_time() -> None:
    calls = 0

    def call() -> bool:
        nonlocal calls
        if (calls := calls + 1) % 2:
            return True
        raise OSError("read-only")

    duty, pauses = _Duty("it fails", call), list[float]()
    for _ in range(12):
        while duty.attempt():
            pass
        pauses.append(duty.left_s())
        duty._backoff.try_now()  # as when the pause is over
    assert pauses[5] > 4 and pauses[-1] > 40


def test_pause_is_short_again_once_all_is_done() -> None:
    answers = iter([OSError(), OSError(), OSError(), OSError(), True, False, OSError()])

    def call() -> bool:
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    duty = _Duty("it fails", call)
    for _ in range(7):
        duty._backoff.try_now()
        duty.attempt()
    assert 0 < duty.left_s() < 1
