"""Settings of a command line as they are kept where others read them: without secrets, and known to be."""

from __future__ import annotations

import pytest

from elastic_rl.config.secrets import is_redacted, redacted_setting


@pytest.mark.parametrize(("word", "shown"), [
    ("--train.lr=0.5", "--train.lr=0.5"),
    ("--train.max_tokens=7", "--train.max_tokens=7"),
    ('--alerts.urls=["slack://T0KEN/a/b"]', "--alerts.urls=…"),
    ("--alerts={urls: [slack://T0KEN]}", "--alerts=…"),
    ("--reward.options.api_key=sk-S3CRET", "--reward.options.api_key=…"),
    ("--reward.options={api_key: sk-S3CRET, model: m}", '--reward.options={"api_key": "…", "model": "m"}'),
    ('--rewards=[{"options": {"token": "S3CRET"}}]', None),
    ("--dcs.durable_url=s3://KEY:S3CRET@host/b", "--dcs.durable_url=…"),
    ("--data.url=https://me:S3CRET@host/x?a=1", "--data.url=https://…@host/x?a=1"),
    ("--model.path=a: {b", "--model.path=a: {b"),
    ("--x=" + "[" * 5000, "--x=" + "[" * 5000),
])
def test_setting_is_shown_without_its_secrets(word: str, shown: str | None) -> None:
    found = redacted_setting(word)
    assert shown is None or found == shown
    assert "S3CRET" not in found and "T0KEN" not in found
    assert is_redacted(found) == (found != word) and redacted_setting(found) == found
