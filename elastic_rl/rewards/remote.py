"""The reward ``remote``: a service of the user's own rewards the samples of a prompt over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import orjson
from pydantic import Field, field_validator

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.net import http_client
from elastic_rl.net.listeners import owners
from elastic_rl.plugins.user_code import plain
from elastic_rl.rewards.base import Reward, RewardContext, gold_answers, rounds
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.runtime.json_values import json_fault
from elastic_rl.runtime.words import counted

_RETRY_S = (0.2, 5.0)
_BUSY = {408, 425, 429, 500, 502, 503, 504}
"""Status codes after which another attempt may succeed."""
_MAX_TOKEN = 16_384
_END_S = 5.0
"""Limit for closing connections; what has not ended by then ends with the process."""
_SHOWN = 300
"""Characters of an answer that an error shows."""


class RemoteOptions(Options):
    urls: Annotated[list[str], Field(min_length=1, max_length=64)]
    """Where samples are posted to, ``http://`` or ``https://``. Each request goes to the next one, and so does each
    try."""
    token_file: str = ""
    """File with a token, sent as ``Authorization: Bearer TOKEN``. It is read for each request, so it may be renewed."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """Seconds for one attempt, whole: connecting, sending, and the answer."""
    attempts: Annotated[int, Field(ge=1, le=20)] = 3
    """Number of attempts, each after a longer pause, before the group's reward has failed."""
    concurrency: Annotated[int, Field(ge=1, le=256)] = 16
    """Number of requests at once."""
    batch_samples: Annotated[int, Field(ge=1, le=4096)] = 64
    """Number of samples in one request; all are of one prompt."""
    max_request_mb: Annotated[int, Field(ge=1, le=1024)] = 16
    """Largest request in MiB."""
    max_answer_mb: Annotated[int, Field(ge=1, le=1024)] = 4
    """Largest answer in MiB."""
    send_token_ids: bool = False
    """Whether the token ids of prompt and responses are sent, besides their text."""

    @field_validator("urls")
    @classmethod
    def _check(cls, urls: list[str]) -> list[str]:
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("a URL is no http:// or https:// address")
            if parts.username or parts.password or parts.query:
                raise ValueError("a URL has a user, a password or a query, which errors would show: use token_file")
        return urls


class Remote:
    """Posts ``{"prompt": {"text", "question", "metadata", "answers"}, "samples": [{"text", "finish_reason"}, …]}`` and
    is answered ``{"rewards": [0.5, {"value": 1.0, "parts": {"style": 0.7}}, …]}``: a finite number, or an object, for
    each sample."""

    def __init__(self, options: Mapping[str, Any], context: RewardContext) -> None:
        """Raises ConfigError, also for a token file that cannot be read."""
        self._options = read_options(RemoteOptions, options, of="the reward 'remote'", setting=context.setting)
        self._decode = context.decode
        try:
            self._headers()
        except PluginFailed as e:
            raise ConfigError(e.message, hint=f"check {context.setting}.token_file") from e
        # The environment's proxies are not used: the token is for this service. Each attempt has one limit for all.
        # Without a token there is no secret to keep from a service of another user.
        token = self._options.token_file
        self._client = http_client.async_client(timeout=None, users=owners(token) if token else None,
                                                limits=httpx.Limits(max_connections=self._options.concurrency))
        self._room = asyncio.Semaphore(self._options.concurrency)
        self._next = count()
        self._closing = False
        # A loop of its own, which keeps the connections: calls may come from another one each time.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="remote-reward", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        size, about = self._options.batch_samples, self._prompt(prompt)
        parts = [asyncio.run_coroutine_threadsafe(self._post(about, samples[i:i + size]), self._loop)
                 for i in range(0, len(samples), size)]
        try:
            found = await asyncio.gather(*map(asyncio.wrap_future, parts))
        except asyncio.CancelledError as e:
            if self._closing:
                raise PluginFailed("the request was given up") from e
            raise
        finally:
            for part in parts:
                part.cancel()  # nobody waits for what is left
        return [reward for rewards in found for reward in rewards]

    def least_timeout_s(self, samples: int) -> float:
        chosen = self._options
        requests = rounds(samples, chosen.batch_samples)
        return rounds(requests, chosen.concurrency) * chosen.attempts * (chosen.timeout_s + _RETRY_S[1])

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            self._thread.join(_END_S)

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.aclose()
        self._loop.stop()

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        has_answer = prompt.metadata.get("answer") is not None or (
            prompt.answer_ids is not None and self._decode is not None)
        about = {"text": prompt.text, "question": prompt.question or prompt.text, "metadata": dict(prompt.metadata),
                 "answers": gold_answers(prompt, self._decode) if has_answer else ()}
        return {**about, "token_ids": prompt.token_ids} if self._options.send_token_ids else about

    def _sample(self, sample: Sample) -> dict[str, Any]:
        about = {"text": sample.text, "finish_reason": sample.finish_reason}
        return {**about, "token_ids": sample.response_ids} if self._options.send_token_ids else about

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if file := self._options.token_file:
            try:
                with Path(file).expanduser().open("rb") as opened:
                    token = opened.read(_MAX_TOKEN + 1).decode("ascii").strip()
            except (OSError, UnicodeDecodeError) as e:
                why = getattr(e, "strerror", None) or "it is no ASCII text"
                raise PluginFailed(f"the token file {file} cannot be read: {why}") from e
            if not token or len(token) > _MAX_TOKEN or not token.isprintable():
                raise PluginFailed(f"the token file {file} holds no token")
            headers["Authorization"] = f"Bearer {token}"
        return headers

    async def _post(self, prompt: Mapping[str, Any], samples: Sequence[Sample]) -> list[Reward]:
        """Raises PluginFailed once the last attempt failed, or at once where another cannot succeed."""
        async with self._room:
            return await self._tries(self._body(prompt, samples), len(samples))

    def _body(self, prompt: Mapping[str, Any], samples: Sequence[Sample]) -> bytes:
        try:
            # Not orjson: it takes no integer of more than 64 bits.
            body = json.dumps({"prompt": prompt, "samples": [self._sample(s) for s in samples]}, allow_nan=False,
                              separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as e:
            fault = json_fault(prompt["metadata"]) or plain(str(e), _SHOWN)
            raise PluginFailed(f"the prompt's metadata are no JSON: {fault}") from e
        if len(body) > self._options.max_request_mb << 20:
            raise PluginFailed(f"a request of {len(body)} bytes is larger than max_request_mb",
                               hint="raise max_request_mb, or lower batch_samples")
        return body

    async def _tries(self, body: bytes, expected: int) -> list[Reward]:
        backoff = RetryBackoff(*_RETRY_S)
        for left in reversed(range(self._options.attempts)):
            url = self._options.urls[next(self._next) % len(self._options.urls)]
            try:
                return self._rewards(await self._answer(url, body), expected)
            except _TryAgain as e:
                if not left:
                    raise PluginFailed(f"{url} {e}, also when tried {self._options.attempts} times") from e
            backoff.failed(time.monotonic())
            await asyncio.sleep(backoff.left_s(time.monotonic()))
        raise AssertionError("the last attempt returns or raises")

    async def _answer(self, url: str, body: bytes) -> bytes:
        """The body of one answer. Raises _TryAgain, and PluginFailed where the service refuses the request."""
        limit, received = self._options.max_answer_mb << 20, bytearray()
        try:
            async with (asyncio.timeout(self._options.timeout_s),
                        self._client.stream("POST", url, content=body, headers=self._headers()) as answer):
                async for piece in answer.aiter_bytes(1 << 16):
                    received += piece
                    if len(received) > limit:
                        raise PluginFailed(f"{url} answers with more than max_answer_mb={self._options.max_answer_mb}")
                status = answer.status_code
        except TimeoutError as e:
            raise _TryAgain(f"did not answer within {self._options.timeout_s:g} s") from e
        except httpx.DecodingError as e:
            raise PluginFailed(f"{url} does not answer as it was asked to: {e}") from e
        except httpx.HTTPError as e:
            raise _TryAgain(f"cannot be reached: {plain(str(e) or type(e).__name__, _SHOWN)}") from e
        if status in _BUSY:
            raise _TryAgain(f"answers {status}: {_shown(received)}")
        if status != 200:
            raise PluginFailed(f"{url} refuses the request with {status}: {_shown(received)}")
        return bytes(received)

    def _rewards(self, answer: bytes, expected: int) -> list[Reward]:
        """Raises PluginFailed for anything but a finite number, or an object with one, for each sample."""
        try:
            rewards = orjson.loads(answer)["rewards"]
            found = [_reward(one) for one in rewards]
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise PluginFailed(f'the service answers no {{"rewards": [NUMBER, …]}}: {_shown(answer)}') from e
        if len(found) != expected:
            raise PluginFailed(f"the service answers {counted(len(found), 'reward')} for "
                               f"{counted(expected, 'sample')}")
        return found


class _TryAgain(Exception):
    """An attempt failed in a way that may pass."""


def _reward(given: Any) -> Reward:
    if isinstance(given, dict):
        return Reward(_number(given["value"]), {str(k): _number(v) for k, v in (given.get("parts") or {}).items()},
                      tuple(_number(turn) for turn in given.get("turns") or ()))
    return Reward(_number(given))


def _number(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError("no number")
    return float(given)


def _shown(answer: bytes | bytearray) -> str:
    return plain(bytes(answer[:4 * _SHOWN]).decode("utf-8", "replace"), _SHOWN)
