"""SGLang engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Positive, Seconds, Section


class EngineConfig(Section):
    start_timeout_s: Seconds = 180.0
    """From launch to the first answer of /model_info."""
    request_timeout_s: Seconds = 60.0
    """Longest wait for one generation."""
    apply_timeout_s: Seconds = 30.0
    """Longest time for one weight update; a slower engine is replaced."""
    drain_timeout_s: Seconds = 60.0
    """Scale-in waits this long for the requests in flight to reach zero."""
    max_total_tokens: Positive = 16384
    max_running_requests: Positive = 256
    """Sequences decoded together; a step's samples of one engine should fit at once."""
    staging_limit_bytes: Annotated[int, Field(ge=0)] = 2 << 30
    """New weights of up to so many bytes a tensor-parallel rank are loaded and checked beside the live ones while the
    engine serves, and exchanged in a short pause; it costs that memory once more. Larger ones are loaded in place, in
    a longer pause."""
    pause: Literal["retract", "in_place"] = "retract"
    """What becomes of requests in flight when the weights change. retract: their KV cache is computed again under the
    new weights. in_place: it stays, and so does the prefix cache: a shorter pause, and tokens whose attention mixes two
    versions."""
    extra_args: list[str] = []
    """More arguments for sglang.launch_server, as they are."""
