"""Settings of a command line as they are kept where others read them: without secrets, and known to be."""

from __future__ import annotations

import pytest

from elastic_rl import config
from elastic_rl.config.secrets import is_redacted, redacted, redacted_setting


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
    ("--data.path=https://h/x?token=S3CRET&sig=T0KEN&a=1", "--data.path=https://h/x?token=…&sig=…&a=1"),
    ("--data.options.url=https://h/x?X-Amz-Credential=T0KEN&X-Amz-Signature=S3CRET",
     "--data.options.url=https://h/x?X-Amz-Credential=…&X-Amz-Signature=…"),
    ("--data.options.urls=['https://h/x?sig=S3CRET']", '--data.options.urls=["https://h/x?sig=…"]'),
    ("--reward.options.OPENAI_KEY=S3CRET", "--reward.options.OPENAI_KEY=…"),
    ("--reward.options.credential=S3CRET", "--reward.options.credential=…"),
    ("--reward.options.credentials={user: me, word: S3CRET}", "--reward.options.credentials=…"),
    ("--reward.options.pw=S3CRET", "--reward.options.pw=…"),
    ("--reward.options.bearer=S3CRET", "--reward.options.bearer=…"),
    ("--reward.options={pw: S3CRET, n: 1}", '--reward.options={"pw": "…", "n": 1}'),
    ("--data.options.auth=Bearer S3CRET", "--data.options.auth=Bearer …"),
    ("--data.options.auth=Basic S3CRET", "--data.options.auth=Basic …"),
    ("--data.options.headers=[[X, Bearer S3CRET]]", '--data.options.headers=[["X", "Bearer …"]]'),
    ("--data.options.headers=[[Authorization, S3CRET]]", '--data.options.headers=[["Authorization", "…"]]'),
    ("--reward.options.cmd=curl -H 'Authorization: Bearer S3CRET'", None),
    ("--reward.options.cmd=curl -H 'Token: S3CRET'", None),
    ("--reward.options.cmd=judge --api-key S3CRET --port 7", "--reward.options.cmd=judge --api-key … --port 7"),
    ("--reward.options.args=['--api-key','S3CRET', '--port', '7']",
     '--reward.options.args=["--api-key", "…", "--port", "7"]'),
    ("--reward.options.args=['--api-key=S3CRET']", '--reward.options.args=["--api-key=…"]'),
    ("--reward.options={env: [{name: API_KEY, value: S3CRET}, {name: HOME, value: h}]}",
     '--reward.options={"env": [{"name": "API_KEY", "value": "…"}, {"name": "HOME", "value": "h"}]}'),
    ("--reward.options={env: [{key: API_KEY, value: S3CRET}]}",
     '--reward.options={"env": [{"key": "API_KEY", "value": "…"}]}'),
    ("--data.options.prompt_key=question", "--data.options.prompt_key=question"),
    ("--data.options={prompt_key: q, answer_key: a}", "--data.options={prompt_key: q, answer_key: a}"),
    ("--coordinator.tls_key=/etc/key.pem", "--coordinator.tls_key=/etc/key.pem"),
    ("--data.options.template=Think… then a basic answer", "--data.options.template=Think… then a basic answer"),
    ("--x=" + "[" * 5000, "--x=" + "[" * 5000),
])
def test_setting_is_shown_without_its_secrets(word: str, shown: str | None) -> None:
    found = redacted_setting(word)
    assert shown is None or found == shown
    assert "S3CRET" not in found and "T0KEN" not in found
    assert is_redacted(found) == (found != word) and redacted_setting(found) == found


def test_settings_of_the_product_that_are_no_secrets_are_all_shown() -> None:
    values = config.parse({"job": "j"}).model_dump(mode="json")
    assert redacted(values) == values
