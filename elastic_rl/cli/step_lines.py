"""The most important training metrics of a step, each in a line for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_UPDATE = (("kl", "KL"), ("kl_reference", "KL to reference"), ("kl_teacher", "KL to teacher"),
           ("entropy", "entropy"), ("clip_fraction", "clip fraction"), ("grad_norm", "gradient norm"))
_THROUGHPUT = (("generate_tokens_per_s", "{:,.0f} tokens/s generated", 1.0),
               ("train_tokens_per_s", "{:,.0f} tokens/s trained", 1.0), ("mfu", "MFU {:.1f} %", 100.0),
               ("peak_memory_bytes", "{:.2f} GiB a rank at most", 2.0 ** -30))


def update_line(update: Mapping[str, Any]) -> str:
    """What the updates of a step measured; empty where nothing is known. ``update``: by the names of
    ``telemetry.training_metrics``."""
    return ", ".join(f"{title} {update[name]:.3g}" for name, title in _UPDATE if update.get(name) is not None)


def throughput_line(throughput: Mapping[str, Any]) -> str:
    """What a step measured of the throughput and the memory."""
    return ", ".join(text.format(throughput[name] * by) for name, text, by in _THROUGHPUT
                     if throughput.get(name) is not None)
