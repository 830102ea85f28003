"""Client of the engine pool, through the router: prompt token ids in; token ids, log-probs and versions out.

Prompt groups of the same moment share HTTP requests. SGLang runs a request with ``n`` > 1 as one prefill and then ``n``
requests, which costs a full round; the same prompt repeated ``n`` times in a batch is 2-3 times as fast for short
answers, and a request of many prompts saves HTTP and scheduling work.
Measured on 2 cores, one engine, 64 prompts x 8 samples x 4 tokens, samples/s: ``n=8`` requests 799, batches of ``n=8``
1020-1120, repeated prompts 1430; behind the router with two engines 470, 1185 and 2408.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import resource
import ssl
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import httpx
import orjson

from elastic_rl.data.samples import MAX_TOKEN_IDS, Sample, Segment
from elastic_rl.engine import packed_answers
from elastic_rl.engine.scoring import ScoreRequest, TokenScores, parse_scores, request_body
from elastic_rl.errors import EngineFailed, PluginFailed, RequestRefused, Unanswered
from elastic_rl.net.engine_key import OTHER_KEY, EngineAccess
from elastic_rl.net.listeners import check_async_connection
from elastic_rl.net.single_connections import SingleConnections
from elastic_rl.plugins.user_code import plain
from elastic_rl.runtime.backoff import backoff_s

if TYPE_CHECKING:  # pydantic is not for the processes of users' ways to generate
    from elastic_rl.config.sampling import SamplingOptions


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. The log-probs that an engine answers with are those of the temperature and the penalties,
    over all tokens: ``top_p``, ``top_k`` and ``min_p`` leave tokens out after that."""

    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Engines derive the seed of each sample from it, the prompt and the sample's number (``engine/sglang/seeds.py``),
    so that a group that is generated again, by whichever engine, is sampled the same. None: the engine chooses."""
    resume: bool = False
    """Whether a sample that an engine gave back unfinished, as it does when it leaves the pool and for an update with
    ``engine.pause_mode=abort``, goes on from its tokens: each part has the version that made it. Else it begins again,
    as it must where seeds decide what is sampled. Penalties and texts of ``stop`` know the new part alone then."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Texts with which a sample ends, for engines with a tokenizer (``PoolSettings.reads_text``)."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @classmethod
    def of(cls, options: SamplingOptions, *, max_new_tokens: int, temperature: float, stop_token_ids: Sequence[int],
           seed: int | None, resume: bool) -> Sampling:
        """``stop_token_ids``: those that end a sample beside those of the options. ``seed``: where nothing is greedy.
        """
        return cls(max_new_tokens, temperature, tuple(dict.fromkeys((*stop_token_ids, *options.stop_token_ids))),
                   seed if temperature else None, resume, options.top_p, options.top_k or -1, options.min_p,
                   tuple(options.stop), options.repetition_penalty, options.presence_penalty,
                   options.frequency_penalty)

    def params(self) -> dict[str, Any]:
        """SGLang's sampling parameters. The router takes one set of them for a whole request."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p,
                "max_new_tokens": self.max_new_tokens, "stop_token_ids": list(self.stop_token_ids),
                "repetition_penalty": self.repetition_penalty, "presence_penalty": self.presence_penalty,
                "frequency_penalty": self.frequency_penalty, **({"stop": list(self.stop)} if self.stop else {}),
                **({"sampling_seed": self.seed} if self.seed is not None else {})}

    def of_rest(self, number: int) -> Sampling:
        """How a sample goes on that was given back unfinished. ``number``: the number of the sample in its group. Each
        is asked for alone then, so that the engine would derive the same seed for all that have the same tokens so far,
        such as none: the number is in the seed instead."""
        if self.seed is None or not number:
            return self
        raw = hashlib.blake2b(array("q", [self.seed, number]).tobytes(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(raw, "little") >> 1)


T = TypeVar("T")
G = TypeVar("G", bound=tuple[Any, ...])
_ANSWER_BYTES, _TOKEN_BYTES, _TOP_BYTES = 1 << 16, 1024, 128
"""The most that an answer has beside its tokens, for each of them (id, log-prob, text, and the version that made it),
and for each of the most probable ones beside a token: several times what engines send."""
_READY = "`elastic-rl engines` shows which engines are ready"
_RETRY_S = (0.2, 2.0)
"""First and longest pause between two attempts of a request."""
BATCH = 128
"""Sequences in one HTTP request, at most."""
_REQUEST_TOKENS = 4096
"""Tokens of responses that one HTTP request with more than one prompt may ask for. All of a request go to one engine:
with larger ones of long responses, some engines would have nothing to do, and a retry would repeat more."""
_CONNECTIONS = 4096
"""Most connections of one client at once; half of the files that the process may open where that is less. A request
that waits for one waits here: in httpx it would fail after a while, as if an engine had."""
_ROUTE = "X-SMG-Routing-Key"
"""Header by which the router, with the policy ``manual``, sends requests to one engine for as long as that serves."""


class Caller:
    """Who asks for samples: one request of many groups, for instance."""

    def __init__(self) -> None:
        self._waiting = 0

    @property
    def is_waiting(self) -> bool:
        """Whether something that it has asked for waits for a free connection."""
        return self._waiting > 0

    @contextlib.contextmanager
    def asks(self) -> Iterator[None]:
        """What is asked for in the block, also by tasks that it begins, is this caller's."""
        token = _CALLER.set(self)
        try:
            yield
        finally:
            _CALLER.reset(token)

    @staticmethod
    @contextlib.contextmanager
    def waits(callers: Collection[Caller]) -> Iterator[None]:
        """A request with what these callers have asked for waits for a connection."""
        for caller in callers:
            caller._waiting += 1
        try:
            yield
        finally:
            for caller in callers:
                caller._waiting -= 1


_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


class _Pending(NamedTuple):
    """A group that is to be sent."""

    prompt: Sequence[int]
    n: int
    """Number of its samples."""
    result: asyncio.Future[list[Sample]]
    caller: Caller | None


class GenerateClient:
    """Client of one router. Use it from one event loop.

    ``timeout_s``: the limit in seconds of one attempt; ``retries``: attempts, each of which may reach another engine
    (besides the router's own retries). ``batch``: sequences per request, fewer of long responses
    (``sequences_of_request``). ``vocabulary``: number of the model's tokens. An id beyond them is never sent: it ends
    the engine that gets it, and then each one that the request is sent to again. ``end_ids``: token ids at which
    engines end a response whatever the request says (``models.arch.end_ids_of``). ``access``: to the router.
    """

    def __init__(self, router_url: str, *, timeout_s: float, retries: int, batch: int = BATCH,
                 vocabulary: int = MAX_TOKEN_IDS, end_ids: Sequence[int] = (), access: EngineAccess = EngineAccess()
                 ) -> None:
        self._url, self._access = httpx.URL(router_url.rstrip("/") + "/generate"), access
        self._timeout_s = timeout_s
        self._retries = retries
        self._batch = batch
        self._vocabulary, self._end_ids = vocabulary, frozenset(end_ids)
        self._pending: dict[tuple[Sampling, str], list[_Pending]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._http: httpx.AsyncBaseTransport | None = None
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections = _CONNECTIONS if files < 0 else max(1, min(_CONNECTIONS, files // 2))
        self._turns = asyncio.Semaphore(self._connections)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, n: int, route: str = "") -> list[Sample]:
        """``n`` samples of one prompt. ``route``: those of one conversation have the same, so that they reach the
        engine that has computed what came before. Raises Unanswered when every attempt failed, RequestRefused, which
        is one, for a prompt or a sampling that engines do not take, and PluginFailed for ids that are none of the
        model's."""
        if not self._has(token_ids):
            wrong = next(t for t in token_ids if not self._has([t]))
            raise PluginFailed(f"a prompt for the engines has the token id {plain(repr(wrong), 40)}, and their model "
                               f"has {self._vocabulary} tokens", hint="tokenize with the model's own tokenizer")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[list[Sample]] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.setdefault((sampling, route), []).append(_Pending(token_ids, n, result, _CALLER.get()))
        return await result

    async def score(self, sequences: Sequence[ScoreRequest], top: int = 0) -> list[TokenScores | None]:
        """What the model makes of the tokens of some sequences, in one request, with the ``top`` most probable ones
        beside each; None for a sequence with tokens that it does not have. Raises EngineFailed and RequestRefused as
        ``generate``."""
        asked = [one for one in sequences if self._has(one.token_ids)]
        if not asked:
            return [None] * len(sequences)
        answers = await self._attempts(request_body(asked, top))
        try:
            found = iter(await asyncio.to_thread(lambda: [
                parse_scores(answer, one, top) for answer, one in zip(answers, asked, strict=True)]))
            return [next(found) if self._has(one.token_ids) else None for one in sequences]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as e:
            raise EngineFailed(f"an engine's answer cannot be read: {type(e).__name__}: {e}") from e

    async def close(self) -> None:
        """Cancels the requests in flight and closes the connections."""
        for task in list(self._sending):
            task.cancel()
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    def _has(self, token_ids: Sequence[int]) -> bool:
        """Whether all are ids of the model."""
        return all(type(t) is int and 0 <= t < self._vocabulary for t in token_ids)

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for (sampling, route), groups in pending.items():
            sequences = sequences_of_request(sampling.max_new_tokens, self._batch)
            for batch in share_requests(groups, sequences, apart=sampling.seed is not None):
                self._start(sampling, route, batch)

    def _start(self, sampling: Sampling, route: str, groups: list[_Pending]) -> None:
        task = asyncio.get_running_loop().create_task(self._send(sampling, route, groups))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

        def cancel_unwanted(_: object) -> None:
            if all(group.result.cancelled() for group in groups):  # nobody waits; the engine ends it too
                task.cancel()

        for group in groups:
            group.result.add_done_callback(cancel_unwanted)

    async def _send(self, sampling: Sampling, route: str, groups: list[_Pending]) -> None:
        body = _generate_body([ids for group in groups for ids in [list(group.prompt)] * group.n], sampling.params())
        callers = {group.caller for group in groups if group.caller is not None}
        try:
            answers = await self._attempts(body, route, unfinished=sampling.resume, callers=callers)
            given = [(group.prompt, number, group.caller) for group in groups for number in range(group.n)]
            found = [parse_sample(answer) for answer in answers]
            if any(sample.finish_reason == "abort" for sample in found):
                found = await _all_or_none([self._finished(prompt, sampling.of_rest(number), route, sample, caller)
                                            for (prompt, number, caller), sample in zip(given, found, strict=True)])
            samples = iter(found)
            for group in groups:
                own = [next(samples) for _ in range(group.n)]
                if not group.result.done():
                    group.result.set_result(own)
        except RequestRefused as e:
            if len(groups) == 1:
                self._fail(groups, e)
            for group in groups if len(groups) > 1 else []:  # which of them it was for is not known
                self._start(sampling, route, [group])
        except EngineFailed as e:
            self._fail(groups, e)
        except asyncio.CancelledError:
            for group in groups:
                group.result.cancel()
            raise
        except Exception as e:  # of whatever an answer has: the task ends here, and somebody waits for its results
            self._fail(groups, Unanswered(f"an engine's answer cannot be read: {type(e).__name__}: {e}"))

    async def _finished(self, prompt: Sequence[int], sampling: Sampling, route: str, sample: Sample,
                        caller: Caller | None) -> Sample:
        """The sample, continued for as long as engines give it back unfinished. Raises EngineFailed once as many
        attempts, one after the other, have added no token."""
        vain, ends = 0, self._end_ids.union(sampling.stop_token_ids)
        while sample.finish_reason == "abort":
            # An engine may have sampled one more token when it aborts, and does not look at what that is: it may be the
            # end, or an id that the model does not have, at which it ends a response, too. Such a sample is its
            # reader's to refuse (``generation.fault_of``); sent on, the id would end engines.
            ids = sample.response_ids
            if (ids and ids[-1] in ends) or not self._has(ids):
                return replace(sample, finish_reason="stop")
            left = sampling.max_new_tokens - len(sample.response_ids)
            if left <= 0:
                return replace(sample, finish_reason="length")
            if vain:
                if vain >= self._retries:
                    raise Unanswered(f"engines gave a sample back unfinished {vain} times without a further token",
                                     hint=_READY)
                await asyncio.sleep(backoff_s(vain, *_RETRY_S))
            [answer] = await self._attempts(_generate_body(
                [[*prompt, *sample.response_ids]], {**sampling.params(), "max_new_tokens": left}), route,
                unfinished=True, callers=() if caller is None else (caller,))
            more = parse_sample(answer)
            vain = 0 if more.response_ids else vain + 1
            sample = replace(more, segments=(*sample.segments, *(s for s in more.segments if s.size)))
        return sample

    def _fail(self, groups: list[_Pending], error: EngineFailed) -> None:
        for group in groups:
            if not group.result.done():
                group.result.set_exception(error)

    async def _attempts(self, body: dict[str, Any], route: str = "", *, unfinished: bool = False,
                        callers: Collection[Caller] = ()) -> list[dict[str, Any]]:
        """``unfinished``: answers are taken of samples that the engine has aborted. ``callers``: who asks for them."""
        if self._http is None:
            # Without an authority the router serves without TLS: one context, which trusts nobody, for all connections.
            verify = self._access.options.get("verify") or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._http = SingleConnections(lambda: httpx.AsyncHTTPTransport(verify=verify, trust_env=False))
        last = hint = ""
        for attempt in range(self._retries):
            hint = _READY
            if attempt:
                await asyncio.sleep(backoff_s(attempt, *_RETRY_S))
            try:
                async with self._turn(callers), asyncio.timeout(self._timeout_s):
                    # After a failure by any engine: the router may not know yet that the one of the route is gone.
                    status, kind, content = await self._post(self._http, body, "" if attempt else route)
            except TimeoutError:
                last = f"no whole answer within {self._timeout_s:g} s"
                continue
            except (httpx.HTTPError, _NoAnswer) as e:
                last = f"{type(e).__name__}: {e}" if isinstance(e, httpx.HTTPError) else str(e)
                continue
            if status == httpx.codes.OK:
                try:
                    is_packed = kind.partition(";")[0] == packed_answers.MEDIA_TYPE
                    answers: list[dict[str, Any]] = (packed_answers.unpack if is_packed else orjson.loads)(content)
                except ValueError as e:
                    last = f"no JSON, and no packed answers: {e}"
                    continue
                if not _are_answers(answers):
                    last = f"no answers of an engine: {_text(content, 100)}"
                    continue
                if len(answers) == len(body["input_ids"]) and (
                        unfinished or not any(finish_reason(a) == "abort" for a in answers)):
                    return answers
                last = "the engine aborted a sample"
            elif status in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):  # of engine, router
                raise RequestRefused(f"the engine refused the request: {_text(content, 300)}")
            else:
                last = f"HTTP {status}: {_text(content, 300)}"
                hint = OTHER_KEY if status == httpx.codes.UNAUTHORIZED else _READY
        raise Unanswered(f"no engine answered in {self._retries} attempts; the last one: {last}", hint=hint)

    @contextlib.asynccontextmanager
    async def _turn(self, callers: Collection[Caller]) -> AsyncIterator[None]:
        """One of the connections, once one is free."""
        with Caller.waits(callers):
            await self._turns.acquire()
        try:
            yield
        finally:
            self._turns.release()

    async def _post(self, http: httpx.AsyncBaseTransport, body: dict[str, Any], route: str) -> tuple[int, str, bytes]:
        """Status, media type and content of an answer, of no more bytes than one to this request has. Raises
        httpx.HTTPError, PortTaken, and _NoAnswer for a longer one."""
        # Without compression: a few bytes could stand for any number.
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json", **self._access.headers,
                   **({_ROUTE: route} if route else {})}
        limit, content = answer_limit(body), bytearray()
        # Without httpx's client, whose redirects and cookies took a third of the CPU time of a request, and without its
        # timeouts, one for each read and write: the caller has one for all.
        reply = await http.handle_async_request(httpx.Request(
            "POST", self._url, content=orjson.dumps(body), headers=headers,
            extensions={"trace": check_async_connection}))
        assert isinstance(reply.stream, httpx.AsyncByteStream)
        async with contextlib.aclosing(reply.stream) as pieces:
            if reply.headers.get("Content-Encoding", "identity") != "identity":
                raise _NoAnswer("it is compressed, which was not asked for")
            async for piece in pieces:
                content += piece
                if len(content) > limit:
                    raise _NoAnswer(f"it has more than {limit} bytes, which no answer to the request has")
            return reply.status_code, reply.headers.get("Content-Type", ""), bytes(content)


async def _all_or_none(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What the calls return, in order. When one raises, the others have ended before this raises the same."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _NoAnswer(Exception):
    """What came is none of an engine; the text says why."""


def _generate_body(prompts: Sequence[Sequence[int]], params: Mapping[str, Any]) -> dict[str, Any]:
    return {"input_ids": prompts, "return_logprob": True,
            packed_answers.REQUEST_FIELD: True, "sampling_params": params}


def answer_limit(body: dict[str, Any]) -> int:
    """Bytes that an answer to a request can have, generously. Pure."""
    new = int(body["sampling_params"]["max_new_tokens"])
    tokens = sum(len(ids) + new for ids in body["input_ids"])
    return _ANSWER_BYTES * (1 + len(body["input_ids"])) + tokens * (
        _TOKEN_BYTES + _TOP_BYTES * int(body.get("top_logprobs_num", 0)))


def _text(content: bytes, characters: int) -> str:
    return content[:4 * characters].decode(errors="replace")[:characters]


def sequences_of_request(max_new_tokens: int, batch: int = BATCH) -> int:
    """Sequences that an HTTP request of more than one prompt may have. Pure."""
    return max(1, min(batch, _REQUEST_TOKENS // max_new_tokens))


def share_requests(groups: Sequence[G], sequences: int, *, apart: bool) -> Iterator[list[G]]:
    """Groups (prompt, number of samples, anything more) that share a request, of at most ``sequences`` sequences if it
    has more than one group. ``apart``: no prompt is in a request twice; the seeds of a group would depend on which
    others came before it."""
    batch: list[G] = []
    prompts: set[tuple[int, ...]] = set()
    for group in groups:
        prompt = tuple(group[0])
        if batch and (sum(g[1] for g in batch) + group[1] > sequences or (apart and prompt in prompts)):
            yield batch
            batch, prompts = [], set()
        batch.append(group)
        prompts.add(prompt)
    if batch:
        yield batch


def _are_answers(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(a, dict) and isinstance(a.get("meta_info"), dict) for a in found)


def finish_reason(answer: dict[str, Any]) -> str:
    """stop, length or abort."""
    reason = answer["meta_info"].get("finish_reason")
    return str(reason.get("type", "abort")) if isinstance(reason, dict) else "abort"


def parse_sample(answer: dict[str, Any]) -> Sample:
    """A Sample from one element of SGLang's answer to /generate, or of an unpacked one, with a segment for each weight
    version."""
    meta = answer["meta_info"]
    made: Callable[..., Segment] = Segment
    if isinstance(answer, packed_answers.Unpacked):
        ids, logprobs, made = answer["output_ids"], meta[packed_answers.LOGPROBS], Segment.of_arrays
    else:
        ids = tuple(map(int, answer["output_ids"]))
        logprobs = tuple(float(entry[0]) for entry in (meta["output_token_logprobs"] if ids else ()))
    spans = [(int(s["start"]), int(s["end"]), to_version(s["version"])) for s in meta.get("weight_versions") or ()]
    # Each begins where the one before ends. By their bounds alone: those of a wrong answer may be any number.
    if any(start > end for start, end, _ in spans) or (
            [*(start for start, _, _ in spans), len(ids)] != [0, *(end for _, end, _ in spans)]):
        # It says nothing of where the versions changed, so all tokens count as of the oldest.
        spans = [(0, len(ids), min((v for _, _, v in spans), default=to_version(meta.get("weight_version", ""))))]
    return Sample(tuple(made(ids[start:end], logprobs[start:end], version=version)
                        for start, end, version in spans), finish_reason=finish_reason(answer))


def to_version(text: object) -> int:
    """SGLang's weight version as a number; 0 for its name before the first update."""
    return int(text) if isinstance(text, str) and text.isdigit() else 0
