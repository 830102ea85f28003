"""Has SGLang's HTTP server pack its answers where a request asks for that (``engine/packed_answers.py``)."""

from __future__ import annotations

import functools
from typing import Any

from elastic_rl.engine import packed_answers


def install() -> None:
    """Has the server of this process do it. It wraps what answers /generate, which is no public API."""
    from fastapi import Response
    from sglang.srt.entrypoints import http_server

    server: Any = http_server
    serve = server.serve_generate_request

    @functools.wraps(serve)
    async def serve_packed(obj: Any, request: Any) -> Any:
        if obj.stream or not getattr(obj, packed_answers.REQUEST_FIELD) or not obj.return_logprob:
            return await serve(obj, request)
        try:
            found = await anext(server._global_state.tokenizer_manager.generate_request(obj, request))
        except ValueError as e:  # as the server's own function has it
            return server._create_error_response(e)
        return Response(packed_answers.pack(found if isinstance(found, list) else [found]),
                        media_type=packed_answers.MEDIA_TYPE)

    server.serve_generate_request = serve_packed
