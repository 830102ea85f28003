"""Text without secrets."""

from __future__ import annotations

import pytest

from elastic_rl.runtime.secret_names import is_secret_name, without_secrets_of

ENVIRONMENT = {"WANDB_API_KEY": "k" * 12, "MLFLOW_TRACKING_PASSWORD": "hunter2hunter2", "HF_TOKEN": "word",
               "HOME": "/home/someone", "AWS_SESSION_TOKEN": "s3ss10n-t0k3n", "DB_PASSWORD": "pa/55"}


@pytest.mark.parametrize(("text", "shown"), [
    ("https://me:pa55@host/x?write_token=abc&a=1", "https://…@host/x?write_token=…&a=1"),
    ("GET /x?key=abc&apiKey=def said 401", "GET /x?key=…&apiKey=… said 401"),
    (f"the key {'k' * 12} is wrong", "the key … is wrong"),
    ("hunter2hunter2 and s3ss10n-t0k3n in /home/someone", "… and … in /home/someone"),
    ("?password=abc&secret=d; {'api_key': 'x y', \"token\": 7}",
     "?password=…&secret=…; {'api_key': …, \"token\": …}"),
    ("Authorization: Bearer abc.def-1 refused", "Authorization: … refused"),
    ("authorization=Basic YWJj, Host: h", "authorization=…, Host: h"),
    ("at pa/55 or pa%2F55", "at … or …"), ("ValueError: no token: here", "ValueError: no token: …"),
    ("a word of max_tokens=5", "a word of max_tokens=5"), ("", "")])
def test_text_is_shown_without_secrets(text: str, shown: str) -> None:
    assert without_secrets_of(ENVIRONMENT, text) == shown


def test_column_is_no_secret() -> None:
    assert not any(map(is_secret_name, ("prompt_key", "answer_key", "max_tokens", "token_file")))
    assert all(map(is_secret_name, ("HF_TOKEN", "apiKey", "x-api-key", "AWS_SECRET_ACCESS_KEY")))
