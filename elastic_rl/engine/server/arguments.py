"""What the arguments of an SGLang server say about the resources that it needs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_rl.errors import ConfigError

_TENSOR_PARALLEL = (("--tp-size", "--tp"), ("--tensor-parallel-size", "--tensor"))
"""Options of the same meaning, each with its shortest abbreviation: argparse takes any unambiguous beginning."""


def tensor_parallel(args: Sequence[str]) -> int:
    """Number of ranks, and so of GPUs, that a server with these arguments splits its weights over; 1 without the
    option. As for argparse, ``--tp 2`` and ``--tp=2`` are the same and the last one counts. Raises ConfigError."""
    value = "1"
    for index, word in enumerate(args):
        name, has_value, inline = word.partition("=")
        if any(option.startswith(name) and name.startswith(shortest) for option, shortest in _TENSOR_PARALLEL):
            value = inline if has_value else args[index + 1] if index + 1 < len(args) else ""
    if not (value.isascii() and value.isdecimal() and int(value) > 0):
        raise ConfigError(f"engine.extra_args: the tensor-parallel size is {value!r}",
                          hint="write it as --tp-size 2 or --tp-size=2")
    return int(value)
