"""One rank that trains, saves its state through the host, restores it into a new model and trains on.

    state_scenario.py cpu|cuda FOLDER CASE...

A case is a dtype, such as ``float32``, and optionally ``-distributed``, for the distributed optimizer. Each has a
process of its own, which is forked from this one, since imports are most of what it costs. Prints ``CASE same`` for
each that ends well.

In a process of its own: on the CPU, Megatron needs its stand-in for torch.cuda.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.trainer.broadcast import broadcast_numbers
from elastic_rl.trainer.checkpoint import snapshot
from elastic_rl.trainer.checkpoint.host_copy import HostCopier
from elastic_rl.trainer.checkpoint.snapshot import StateLoader
from elastic_rl.trainer.megatron import megatron_cpu, parallel
from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.parallel import ParallelDims
from elastic_rl.trainer.megatron.policy import ModelArch, Policy
from elastic_rl.trainer.micro_batches import ModelInput
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.reference import Reference

HIDDEN, FFN, HEADS, KV_HEADS, HEAD, LAYERS, VOCAB = 32, 64, 4, 2, 8, 2, 20
BUCKET = 1 << 14
Trained = tuple[Policy, Adam, Reference]


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen3", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCAB,
        "max_position_embeddings": 32, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}))
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN),
              "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        layer = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
                 "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
                 "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
                 "self_attn.q_norm": (HEAD,), "self_attn.k_norm": (HEAD,), "mlp.gate_proj": (FFN, HIDDEN),
                 "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    save_file({n: 1 + 0.1 * torch.randn(s, generator=generator) if "norm" in n else
               0.1 * torch.randn(s, generator=generator) for n, s in shapes.items()}, folder / "model.safetensors")
    return folder


def make(cfg: Config, par: ParallelDims, folder: Path) -> Trained:
    policy = Policy(ModelArch.read(folder), cfg, par)
    return policy, Adam(policy, cfg), Reference(policy, None, BUCKET)


def train(trained: Trained, steps: range) -> None:
    policy, adam, _ = trained
    for step in steps:
        tokens = torch.randint(0, VOCAB, (8, 12), generator=torch.Generator().manual_seed(step))
        adam.zero_grad()
        inputs = tokens[:, :-1].to(policy.par.device)
        # Packed rows, which are the default, and padded ones in turn.
        logits = policy.forward(ModelInput(inputs) if step % 2 else ModelInput(inputs.reshape(1, -1), (11,) * 8))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(logits.device))
        loss.backward()
        adam.reduce_and_step(1e-2)


def saved(trained: Trained, copier: HostCopier) -> dict[str, torch.Tensor]:
    """The whole state, as it would be published."""
    policy, adam, reference = trained
    sections = chain([snapshot.weights(policy, BUCKET)], snapshot.extras(policy, adam, BUCKET))
    own = {name: host.clone() for section in sections for _, name, host in copier(section)}
    with reference.in_place():
        return own | {name: host.clone() for _, name, host in copier(snapshot.reference(policy, BUCKET))}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, exactly: bool) -> None:
    assert set(one) == set(other)
    for name, tensor in one.items():
        if exactly or name.startswith("rng."):
            assert torch.equal(tensor, other[name]), name
        else:  # kernels may add in another order each time
            torch.testing.assert_close(tensor, other[name], msg=lambda m, n=name: f"{n}: {m}")


def run(device: str, folder: Path, case: str) -> None:
    dtype, _, distributed = case.partition("-")
    folder.mkdir()
    cfg = config.parse({
        "seed": 1, "device": {"type": device, "layer_spec": "local", "dtype": dtype}, "train": {"max_grad_norm": 0.5},
        "trainer": {"tensor_parallel": 1, "data_parallel": 1, "distributed_optimizer": bool(distributed)}})
    par = parallel.init(cfg, LOOPBACK)
    assert par.device.type == device and dist.get_backend() == ("nccl" if device == "cuda" else "gloo")
    total = torch.ones(3, device=par.device)
    dist.all_reduce(total)
    assert total.tolist() == [1, 1, 1] and broadcast_numbers([7, 1 << 40], par) == [7, 1 << 40]

    model, copier = make_folder(folder / "model"), HostCopier(par.device, staged=True)
    undisturbed = make(cfg, par, model)
    undisturbed[0].load_folder(model)
    undisturbed[2].renew(Progress("rl"))
    before_first = saved(undisturbed, copier)
    assert not any(t.any() for name, t in before_first.items() if name.startswith("exp_avg"))
    train(undisturbed, range(3))
    state = saved(undisturbed, copier)
    weight = "model.norm.weight"
    assert torch.equal(state[f"reference.{weight}"], before_first[weight])
    assert not torch.equal(state[f"reference.{weight}"], state[weight])
    assert any(name.startswith("rng.") and name.endswith(".cuda") for name in state) == (device == "cuda")
    draws = [torch.rand(4), torch.rand(4, device=par.device)]

    resumed = make(cfg, par, model)
    torch.manual_seed(99)
    loader = StateLoader(*resumed)
    for name, tensor in reversed(state.items()):
        if loader.select(name):
            loader.load(name, tensor)
    loader.apply(updates=3, has_reference=True)
    assert all(torch.equal(a, b) for a, b in zip(draws, [torch.rand(4), torch.rand(4, device=par.device)], strict=True))
    torch.set_rng_state(state["rng.pp0tp0.torch"])
    if device == "cuda":
        torch.cuda.set_rng_state(state["rng.pp0tp0.cuda"])
    same(state, saved(resumed, copier), exactly=True)
    for trained in (undisturbed, resumed):
        train(trained, range(3, 6))
    same(saved(undisturbed, copier), saved(resumed, copier), exactly=device == "cpu")

    undisturbed[1].reset()
    assert not any(t.any() for kind in undisturbed[1].moments().values() for t in kind.values())
    train(undisturbed, range(6, 7))
    print(case, "same", flush=True)
    dist.destroy_process_group()


def preload(device: str) -> None:
    """Imports what ranks import when they are made (see ``elastic_rl/trainer/group/preload.py``)."""
    if device == "cpu":
        megatron_cpu.install()
    for module in ("megatron.core.distributed", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer",
                   "torch._dynamo"):
        importlib.import_module(module)


def main(device: str, folder: Path, cases: Sequence[str]) -> None:
    preload(device)
    for case in cases:
        if (pid := os.fork()) == 0:
            return run(device, folder / case, case)
        os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
