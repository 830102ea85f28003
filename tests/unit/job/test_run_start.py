"""What a run that resumes says of its learning rate."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl import config
from elastic_rl.algorithms.schedule import learning_rate
from elastic_rl.etcd.records import JobStatus
from elastic_rl.job.run_start import ResumePoint, already_done, rate_change


def parse(section: str = "train", **values: Any) -> config.Config:
    return config.parse({section: values})


def said(cfg: config.Config, step: int, old_steps: int, *, supervised: bool = False) -> str:
    before = JobStatus(phase="stopped").replace(**{"sft_steps" if supervised else "steps": old_steps})
    return rate_change(cfg, ResumePoint(step, supervised), before)


def test_more_steps_stretch_the_schedule_and_the_warning_has_both_rates() -> None:
    text = said(parse(steps=200, lr=1e-3, lr_warmup_steps=0), 100, 100)
    assert "learning rate of step 101 is 0.000548, and is 0.0001 with the 100 steps of before" in text
    assert "train.lr_decay=linear runs over train.steps, which is 200 now" in text
    assert said(parse("sft", max_steps=200, lr_decay="cosine"), 90, 100, supervised=True)


def test_schedule_that_does_not_depend_on_the_steps_so_far_needs_no_warning() -> None:
    assert said(parse(steps=200, lr_decay="constant"), 100, 100) == ""
    assert said(parse(steps=200, lr_decay="wsd"), 80, 100) == "", "it falls later"
    assert said(parse(steps=100), 50, 100) == "", "as many as before"
    assert said(parse(steps=100, lr=1e-5), 50, 100) == "", "a rate that was set is the user's"
    assert said(parse(steps=200), 50, 0) == "", "a job of which nothing is known"


@settings(max_examples=seeds(40))
@given(steps=st.integers(2, 500), old=st.integers(1, 500), step=st.integers(0, 499),
       decay=st.sampled_from(["constant", "linear", "cosine", "wsd"]))
def test_settings_of_the_warning_keep_the_rate(steps: int, old: int, step: int, decay: str) -> None:
    text = said(parse(steps=steps, lr_decay=decay), step, old)
    if text:
        kept = config.parse(config.given(None, re.findall(r"--(train\S+)", text)) | {})
        as_before = parse(steps=old, lr_decay=decay)
        assert abs(learning_rate(kept, "rl", step + 1) / learning_rate(as_before, "rl", step + 1) - 1) < 0.01
    else:
        rates = [learning_rate(parse(steps=n, lr_decay=decay), "rl", step + 1) for n in (steps, old)]
        assert step >= steps or abs(rates[0] - rates[1]) <= 0.01 * max(rates)


def test_job_that_is_done_says_how_to_go_on() -> None:
    error = already_done(parse(steps=10), 10)
    assert error.message.endswith("its 10 steps") and "`--train.steps=N` with N above 10" in error.hint
    assert "--train.steps" not in already_done(config.parse({"mode": "eval"}), 3).hint
