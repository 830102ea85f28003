"""An engine over HTTP that says in each turn of an episode what a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.engine.own_generate import OwnGenerate
from support import http_servers


class Engine:
    """Answers as SGLang does: the turns of a sample that ``says`` gives, by how many the prompt has, and by the number
    of the sample in its request."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.tokenizer, self.asked, self.status = tokenizer, list[tuple[list[int], str]](), 200
        self.says: Callable[[int, int], str] = lambda turn, index: ""
        self.version: Callable[[], int] = lambda: 3
        self.before_turn: Callable[[int, str], None] = lambda turn, prompt: None
        """``prompt``: its text, with the turns before."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                status, answers = engine.answered(body, self.headers.get("X-SMG-Routing-Key", ""))
                raw = json.dumps(answers).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        http_servers.serve(self.server)

    def close(self) -> None:
        http_servers.close(self.server)

    def answered(self, body: dict[str, Any], route: str) -> tuple[int, Any]:
        answers = []
        for index, ids in enumerate(body["input_ids"]):
            prompt = self.tokenizer.decode(ids, skip_special_tokens=False)
            turn = prompt.count("<|tool|>")
            self.before_turn(turn, prompt)
            if turn and self.status != 200:
                return self.status, {}
            self.asked.append((ids, route))
            [said] = self.tokenizer.encode_batch([self.says(turn, index)], special_tokens=False)
            said = [*said, self.tokenizer.eos_ids[0]]
            answers.append({"output_ids": said, "meta_info": {
                "finish_reason": {"type": "stop"}, "weight_version": str(self.version()),
                "output_token_logprobs": [[-0.25, t, None] for t in said]}})
        return 200, answers


def prompt_request(engine: Engine, what: str = "", samples: int = 2) -> PromptRequest:
    """A request for episodes. ``what``: in the prompt's metadata, for the environment."""
    [ids] = engine.tokenizer.encode_batch(["<|user|>go<|end|><|assistant|>"], special_tokens=False)
    return PromptRequest(0, Prompt(tuple(ids), metadata={"what": what}),
                         Sampling(20_000, stop_token_ids=engine.tokenizer.eos_ids, seed=7), samples)


async def outcome(own: OwnGenerate, asked: PromptRequest, limit_s: float = 60.0) -> list[Sample] | Exception:
    """The samples, or why there are none."""
    try:
        async with own.within(limit_s):
            return await own(asked, None)  # type: ignore[arg-type]
    except Exception as e:
        return e
