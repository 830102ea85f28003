"""SGLang engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Positive, Seconds, Section


class EngineConfig(Section):
    start_timeout_s: Seconds = 600.0
    """Seconds from the launch of an engine to its first answer; a slower one is replaced. A pool that has fewer engines
    than desired for this long raises ``pool.short``."""
    request_timeout_s: Seconds = 60.0
    """Seconds that one generation request may take before it fails and is retried."""
    apply_timeout_s: Seconds = 30.0
    """Seconds that one weight update of an engine may take; a slower engine is replaced."""
    drain_timeout_s: Seconds = 60.0
    """Seconds for which an engine that is scaled in may finish its requests in flight before it is stopped."""
    max_total_tokens: Positive = 16384
    """Capacity of an engine's KV cache, in tokens (SGLang's ``--max-total-tokens``)."""
    max_running_requests: Positive = 256
    """Largest number of sequences that an engine decodes at once; further ones wait in its queue. The samples of one
    step that an engine gets should fit."""
    staging_limit_bytes: Annotated[int, Field(ge=0)] = 2 << 30
    """Weights of up to this many bytes a tensor-parallel rank are loaded and verified beside the live ones while the
    engine serves, and swapped in during a short pause; that takes the same memory once more. Larger ones are loaded in
    place during a longer pause. 0: always in place."""
    pause_mode: Literal["retract", "in_place"] = "retract"
    """What happens to requests in flight when the weights change. ``retract``: they continue, and their KV cache is
    computed again with the new weights. ``in_place``: they continue with their KV cache and the prefix cache is kept: a
    shorter pause, and tokens whose attention mixes two versions."""
    extra_args: list[str] = []
    """Further arguments of ``sglang.launch_server``, passed on unchanged."""
