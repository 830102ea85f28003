"""The experience of one RL step as tensors, and its wire format (safetensors: nothing is pickled)."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from elastic_rl.errors import ConfigError


@dataclass(frozen=True)
class TrainBatch:
    """N samples, right-padded to fixed shapes. A sample's tokens are its prompt, its response, then padding."""

    tokens: torch.Tensor
    """[N, T] int64."""
    prompt_len: torch.Tensor
    """[N] int64."""
    response_len: torch.Tensor
    """[N] int64; prompt_len + response_len <= T."""
    engine_logprobs: torch.Tensor
    """[N, R] fp32: log-probs of the response's tokens by the engine that sampled them, padded with 0."""
    advantages: torch.Tensor
    """[N] fp32."""
    policy_versions: torch.Tensor
    """[N] int64: policy version that generated the sample."""
    groups: torch.Tensor
    """[G] int64: ordinals of the prompt groups in the batch."""

    @property
    def samples(self) -> int:
        return int(self.tokens.shape[0])

    def check(self) -> TrainBatch:
        """Returns itself. Raises ConfigError for inconsistent shapes, dtypes or lengths."""
        if self.tokens.ndim != 2 or self.engine_logprobs.ndim != 2 or not self.samples:
            raise ConfigError(f"a batch needs tokens [N, T] and engine_logprobs [N, R] with N > 0, not "
                              f"{list(self.tokens.shape)} and {list(self.engine_logprobs.shape)}")
        n, width = self.tokens.shape
        for name in ("prompt_len", "response_len", "advantages", "policy_versions"):
            if list(getattr(self, name).shape) != [n]:
                raise ConfigError(f"{name} must have shape [{n}], not {list(getattr(self, name).shape)}")
        for field in fields(self):
            expected = torch.float32 if field.name in ("engine_logprobs", "advantages") else torch.int64
            if (dtype := getattr(self, field.name).dtype) != expected:
                raise ConfigError(f"{field.name} must be {expected}, not {dtype}")
        if self.engine_logprobs.shape[0] != n:
            raise ConfigError(f"engine_logprobs has {self.engine_logprobs.shape[0]} rows for {n} samples")
        if bool((self.prompt_len < 1).any()) or bool((self.response_len < 0).any()):
            raise ConfigError("prompts must have at least one token and responses no negative length")
        if int((self.prompt_len + self.response_len).max()) > width:
            raise ConfigError(f"a sample is longer than its row of {width} tokens")
        if int(self.response_len.max()) > self.engine_logprobs.shape[1]:
            raise ConfigError("a response is longer than its row of engine_logprobs")
        if not int(self.response_len.sum()):
            raise ConfigError("the batch has no response token")
        return self

    def rows(self, part: slice) -> TrainBatch:
        """The samples of a slice, with all ``groups``."""
        return TrainBatch(**{f.name: getattr(self, f.name) if f.name == "groups" else getattr(self, f.name)[part]
                             for f in fields(self)})

    def to_bytes(self, **meta: int | float | str | list | dict) -> bytes:
        """safetensors, with ``meta`` as JSON in the header."""
        tensors = {f.name: getattr(self, f.name).contiguous() for f in fields(self)}
        return save(tensors, metadata={"meta": json.dumps(meta)})

    @classmethod
    def from_bytes(cls, raw: bytes) -> TrainBatch:
        """Raises ConfigError when the bytes are not a batch."""
        try:
            tensors = load(raw)
        except SafetensorError as e:
            raise ConfigError(f"the body is not safetensors: {e}") from e
        names = {f.name for f in fields(cls)}
        if set(tensors) != names:
            raise ConfigError(f"a batch has the tensors {sorted(names)}, not {sorted(tensors)}")
        return cls(**tensors).check()


def meta_of(raw: bytes) -> dict:
    """The JSON that ``to_bytes`` put into the header. Raises ConfigError when the bytes are not a batch."""
    try:
        size = int.from_bytes(raw[:8], "little")
        return json.loads(json.loads(raw[8:8 + size])["__metadata__"]["meta"])
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"the body has no metadata: {e}") from e
