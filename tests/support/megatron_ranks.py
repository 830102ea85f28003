"""The scenarios that ranks of Megatron perform in tests, each by its name, and the batches that they have."""

from __future__ import annotations

import itertools
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from elastic_rl.algorithms.registry import ALGOS, AlgorithmSpec, algorithm_of
from elastic_rl.config import AlgorithmConfig, Config
from elastic_rl.data.batch import Batch, collate, collate_answers
from elastic_rl.data.samples import Prompt, Sample, Segment
from elastic_rl.data.sources import make_source
from elastic_rl.dcs.publish.part_writer import _view_of
from elastic_rl.errors import ConfigError, PluginFailed, StepRefused
from elastic_rl.trainer.checkpoint.snapshot import StateLoader, extras, owned_tensors, reference, weights
from elastic_rl.trainer.forward import IN_PASSES
from elastic_rl.trainer.megatron import parallel
from elastic_rl.trainer.megatron.device_memory import DeviceMemory
from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.pipeline import run
from elastic_rl.trainer.megatron.policy import ModelArch, Policy
from elastic_rl.trainer.micro_batches import ModelInput, cut
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.reference import Reference
from elastic_rl.trainer.step import TrainStep
from elastic_rl.trainer.throughput import Passed, Throughput

BUCKET = 1 << 16
_ADDITIONS = {"entropy_coef": 0.3, "kl_coef": 0.5, "tis_cap": 1.1}
ALL = "gspo with all"
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"name": name, "constant_length_tokens": 9,
              "teacher": "teacher" if "teacher_logprobs" in spec.inputs else None}
       for name, spec in ALGOS.items() if spec.advantages},
    "grpo with teacher_top_k": {"teacher": "teacher", "teacher_top_k": 4, "teacher_coef": 0.7},
    **{f"grpo, {aggregate} aggregate": {"aggregate": aggregate, "constant_length_tokens": 7}
       for aggregate in ("token", "sequence", "constant")},
    **{f"grpo with {setting}": {setting: value} for setting, value in _ADDITIONS.items()},
    ALL: {"name": "gspo", **_ADDITIONS, "kl_estimator": "k2"}}
"""Settings of the algorithm whose gradients are compared, by a name for them."""
CUTS: dict[str, dict[str, Any]] = {
    "small micro-batches": {"micro_batch_tokens": 40, "packing": False},
    "packed": {"micro_batch_tokens": 40, "packing": True},
    "packed again": {"micro_batch_tokens": 40, "packing": True},
    "packed, one sequence each": {"micro_batch_tokens": 1, "packing": True}}
"""Settings of the trainer under which gradients are the same, by a name for them."""
ATTENDED = [(1, 0), (2, 0), (2, 1), (4, 1)]
"""Numbers of context-parallel ranks, with the rank whose attention is measured."""
NOT_IMPORTED = ("torch._inductor.compile_fx", "wandb", "torch.utils.tensorboard")
"""The compiler, and loggers, which Megatron would import and no rank on a CPU uses."""


def synthetic(cfg: Config, samples: int) -> Batch:
    """Right and wrong answers of several lengths, with advantages of both signs; the same on every rank. Some have a
    segment in between that is not trained on."""
    prompts = (list(make_source(cfg).train) * 2)[:samples]
    generator = torch.Generator().manual_seed(0)
    rows: list[tuple[Prompt, Sample]] = []
    for i, prompt in enumerate(prompts):
        answer = prompt.answer_ids or ()
        n = int(torch.randint(1, len(answer) + 1, (), generator=generator))
        logprobs = torch.randn(n, generator=generator).mul(0.1).sub(2.7).tolist()
        segments = [Segment(answer[:n], tuple(logprobs), version=1)]
        if i % 3 == 0:
            segments = [Segment(answer[:1], tuple(logprobs[:1]), version=1), Segment((5, 6), loss=False),
                        Segment(answer[1:n], tuple(logprobs[1:]), version=2)]
        rows.append((prompt, Sample(tuple(segments))))
    return collate(rows, torch.randn(samples, generator=generator).tolist())


def with_reference(cfg: Config, vocab: int) -> Batch:
    """A batch of tokens below ``vocab``, with log-probs of a made-up reference policy and of a made-up teacher, and an
    advantage for each token."""
    batch = synthetic(cfg, 64)
    generator = torch.Generator().manual_seed(1)
    reference = batch["old_logprobs"] + torch.randn(batch["old_logprobs"].shape, generator=generator) * 0.2
    top = torch.randn(batch.loss_tokens, vocab, generator=generator).log_softmax(-1).topk(5)
    top.indices[::3, 4], top.values[::3, 4] = -1, -50.0  # a token that is not there
    return batch.with_tensors(
        ref_logprobs=reference, tokens=batch["tokens"].clamp(max=vocab - 1),
        token_advantages=torch.randn(reference.shape, generator=generator),
        teacher_top_ids=top.indices.int(), teacher_top_logprobs=top.values)


def logits(policy: Policy, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The whole logits, on one of the ranks that have them; nothing on the others."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

    out: dict[str, torch.Tensor] = {}

    def finish(number: int, part: torch.Tensor) -> torch.Tensor:
        full = gather(part.contiguous())
        if policy.par.tp_rank == policy.par.dp_rank == 0:
            out["logits"] = full
        return part.new_zeros(())

    with torch.no_grad():
        run(policy, [ModelInput(tokens)], finish, train=False)
    return out


def state(policy: Policy, adam: Adam, kept: Reference | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a trainer_state that this rank owns. A publish would store each, though some are in one memory one
    after the other."""
    out: dict[str, torch.Tensor] = {}
    views: dict[Any, torch.Tensor] = {}  # keeps the tensors, so that no other gets their memory
    for _, name, t in chain(weights(policy, BUCKET), chain.from_iterable(extras(policy, adam, BUCKET))):
        assert _view_of(t) not in views, name
        out[name], views[_view_of(t)] = t.clone(), t
    if kept is None:
        return out
    with kept.in_place():
        return out | {name: t.clone() for _, name, t in reference(policy, BUCKET)}


def perform(name: str, scenario: str, model: Path, state_file: str, folder: Path, cfg: Config,
            par: parallel.ParallelDims) -> dict[str, torch.Tensor]:
    """Performs a scenario on a new model; returns the tensors of its result that this rank owns."""
    if scenario.startswith("critic"):
        from support import critic_ranks

        return critic_ranks.perform(scenario, model, state_file, cfg, par)
    policy = Policy(ModelArch.read(model), cfg, par)
    adam = Adam(policy, cfg)
    train_step = TrainStep(policy, adam, cfg, par)
    kept = Reference(policy, None, BUCKET)
    if scenario in ("restore", "resume"):
        restore(policy, adam, kept, state_file, updates=2 * cfg.train.updates_per_step)
        return state(policy, adam, kept) if scenario == "restore" else steps(train_step, range(3, 5))
    if scenario == "go back":
        return go_back(train_step, kept, state_file)
    if scenario == "refused":
        try:
            restore(policy, adam, kept, state_file, updates=1)
        except ConfigError as e:
            return {f"refused {par.rank}": torch.frombuffer(bytearray(str(e).encode()), dtype=torch.uint8)}
    policy.load_folder(model)
    if scenario == "logits":
        tokens = load_file(folder.parent / "tokens.safetensors")["tokens"].clamp(max=policy.arch.vocab - 1)
        return logits(policy, tokens) | {name: t for _, name, t in weights(policy, BUCKET)}
    if scenario == "gradients":
        return gradients(train_step, algorithm_of(cfg), synthetic(cfg, 64))
    if scenario == "one sample":
        return one_sample(train_step)
    if scenario in ("algorithms", "padded"):
        chosen = VARIANTS if scenario == "algorithms" else {ALL: VARIANTS[ALL]}
        return {f"{variant}/{name}": t for variant, found in of_variants(chosen, policy, adam, cfg, par)
                for name, t in found.items()}
    if scenario == "parts":
        return of_parts(policy, adam, cfg, par)
    if scenario == "packed":
        packed = with_trainer(cfg, micro_batch_tokens=37, packing=True, recompute="full")
        return gradients(loaded(model, packed, par), algorithm_of(cfg), synthetic(cfg, 64))
    if scenario == "cuts":
        return cuts(model, cfg, par)
    if scenario == "minibatches":
        return minibatches(model, cfg, par)
    if scenario == "signs of life":
        return signs_of_life(policy, adam, cfg, par)
    if scenario == "recompute":
        return recompute(model, cfg, par)
    if scenario == "imports":
        return {} if par.rank else {module: torch.tensor([module in sys.modules]) for module in NOT_IMPORTED}
    if scenario == "attention":
        return attention()
    if scenario == "failing":
        return failing(policy, adam, cfg, par)
    if scenario == "refusing":
        return refusing(policy, adam, cfg, par)
    if scenario == "corrected":
        corrected = with_algorithm(cfg, tis_cap=1.1)
        metrics_of_step = TrainStep(policy, adam, corrected, par).train(
            synthetic(cfg, 64).shares(par.dp)[par.dp_rank], "rl", 1)
        return {k: torch.tensor([v]) for k, v in metrics_of_step.items() if k != "train_s"} if par.rank == 0 else {}
    if scenario == "temperature":
        return at_temperature(policy, adam, cfg, par)
    if scenario == "load":
        return state(policy, adam)
    if scenario == "undisturbed":
        return steps(train_step, range(1, 5))
    if scenario == "recorded":
        return recorded(train_step)
    if scenario == "throughput":
        return throughput(train_step)
    if scenario == "reference":
        return frozen(policy, adam, cfg, par)
    if scenario.startswith("drift "):
        return drift(float(scenario.removeprefix("drift ")), policy, adam, cfg, par)
    if scenario in ("train", "moved"):
        kept.renew(Progress("rl"))
        batch = synthetic(cfg, 64).shares(par.dp)[par.dp_rank]
        metrics_of_steps = []
        for step in (1, 2):
            metrics_of_steps.append(train_step.train(batch, "rl", step))
            if scenario == "moved":
                move(policy, adam)
        (folder / f"metrics-{name}-{par.rank}.json").write_text(json.dumps(metrics_of_steps))
        return state(policy, adam, kept)
    raise ValueError(scenario)


def move(policy: Policy, adam: Adam) -> None:
    """Moves everything to memory of its own and back, as from a device to the host and back."""
    memory = DeviceMemory.of_rank(policy, adam, movable=lambda tensor: True)
    freed = memory.offload()
    tensors = [*policy.module.parameters(), *adam.tensors(), *(p.main_grad for p in policy.module.parameters())]
    assert not any(t.untyped_storage().nbytes() for t in tensors), "it is not all offloaded"
    numel = sum(p.numel() for p in policy.module.parameters())
    assert freed > 8 * numel, "besides parameters and gradients there is the optimizer's state"
    memory.onload()
    assert not any(p.main_grad.any() for p in policy.module.parameters())


def throughput(train_step: TrainStep) -> dict[str, torch.Tensor]:
    """What torch counts in a forward and a backward pass over samples of one length and over some of several lengths,
    and what the rank reports of one second of that."""
    from torch.utils.flop_counter import FlopCounterMode

    policy, par, cfg = train_step.policy, train_step.par, train_step.cfg
    measure = Throughput(policy.arch, cfg.device, par, torch.float32)
    batch = synthetic(cfg, 64)
    equal = collate([(Prompt((5,) * (longest - 1)), Sample((Segment((6,), (-1.0,), version=1),)))
                     for longest in [int(batch["lengths"].max())] * batch.samples], batch["advantages"].tolist())
    out: dict[str, float] = {}
    for name, whole in (("equal", equal), ("uneven", batch)):
        share = share_of(whole, train_step)
        with FlopCounterMode(display=False) as counter:
            train_step.gradients(share, algorithm_of(cfg))
        out[f"{name}/counted"] = float(counter.get_total_flops())
        out |= {f"{name}/{metric}": value for metric, value in measure.of_step(Passed.of(share), 2, 1.0).items()}
        out[f"{name}/tokens"] = float(whole["lengths"].sum())
    return {f"{par.rank}/{name}": torch.tensor([value], dtype=torch.float64) for name, value in out.items()}


def attention() -> dict[str, torch.Tensor]:
    """The bytes that attention over sequences of some lengths keeps for its backward pass, by ``ATTENDED`` and length.
    """
    from elastic_rl.trainer.megatron.packed_attention import attend

    def kept(length: int, cp: int, cp_rank: int) -> int:
        sizes: dict[int, int] = {}
        tensors = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)  # so that no other one gets its memory
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        q, k, v = (torch.randn(1, heads, n, 16, requires_grad=True) for heads, n in (
            (4, length // cp), (2, length), (2, length)))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            attend(q, k, v, 0.25, cp, cp_rank)
        return sum(sizes.values())

    return {f"{cp} {cp_rank} {length}": torch.tensor([kept(length, cp, cp_rank)])
            for cp, cp_rank in ATTENDED for length in (1024, 2048)}


def with_algorithm(cfg: Config, **algorithm: Any) -> Config:
    return cfg.model_copy(update={"algorithm": AlgorithmConfig(**algorithm)})


def with_trainer(cfg: Config, **trainer: Any) -> Config:
    return cfg.model_copy(update={"trainer": cfg.trainer.model_copy(update=trainer)})


def share_of(batch: Batch, train_step: TrainStep) -> Batch:
    """The share of this rank's replica, as the actor sends it."""
    return batch.shares(train_step.par.dp)[train_step.par.dp_rank]


def restore(policy: Policy, adam: Adam, kept: Reference, state_file: str, updates: int) -> None:
    """Restores the state that another group saved."""
    loader = StateLoader(policy, adam, kept)
    with safe_open(state_file, framework="pt") as opened:
        for name in filter(loader.select, opened.keys()):
            loader.load(name, opened.get_tensor(name))
    loader.apply(updates, has_reference=True)


def go_back(train_step: TrainStep, kept: Reference, state_file: str) -> dict[str, torch.Tensor]:
    """The state after a step from a restored one, and a restore in the same process; and as "held <rank>" how many of
    the moments of that step were in memory when those of the restore were allocated."""
    policy, adam, cfg = train_step.policy, train_step.adam, train_step.cfg
    updates = 2 * cfg.train.updates_per_step
    restore(policy, adam, kept, state_file, updates)
    train_step.train(share_of(synthetic(cfg, 64), train_step), "rl", 3)
    held = [weakref.ref(tensor) for of_kind in adam.moments().values() for tensor in of_kind.values()]
    alive, allocate = [sum(found() is not None for found in held)], adam.allocate_moments

    def counted() -> Any:
        alive.append(sum(found() is not None for found in held))
        return allocate()

    adam.allocate_moments = counted  # type: ignore[method-assign]
    restore(policy, adam, kept, state_file, updates)
    return state(policy, adam, kept) | {f"held {train_step.par.rank}": torch.tensor([*alive, len(held)])}


def one_sample(train_step: TrainStep) -> dict[str, torch.Tensor]:
    """The gradients of a batch of one sample, of which all replicas but one have none, its log-probs, and the weights
    after a step with it as "trained <name>"."""
    policy, cfg, par = train_step.policy, train_step.cfg, train_step.par
    batch = synthetic(cfg, 1)
    share = Batch.from_bytes(share_of(batch, train_step).to_bytes())
    out = gradients(train_step, algorithm_of(cfg), batch)
    logprobs = train_step.forward_logprobs(share)["logprobs"]
    if share.samples and par.is_share_leader:
        out["logprobs"] = logprobs
    metrics = train_step.train(share, "rl", 1)
    Throughput(policy.arch, cfg.device, par, torch.float32).of_step(Passed.of(share), 1, metrics["train_s"])
    return out | {f"trained {name}": t.clone() for _, name, t in weights(policy, BUCKET)}


def at_temperature(policy: Policy, adam: Adam, cfg: Config, par: parallel.ParallelDims) -> dict[str, torch.Tensor]:
    """Log-probs of each phase with a sampler of temperature 0.5, with tokens and mask; by the number of the replica."""
    cooled = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"temperature": 0.5})})
    train_step = TrainStep(policy, adam, cooled, par)
    share = share_of(synthetic(cfg, 16), train_step)
    found = {phase: train_step.forward_logprobs(share, phase, greedy=False)["logprobs"] for phase in ("rl", "sft")}
    found |= {name: share[name] for name in ("tokens", "lengths", "loss_mask")}
    return {f"{name} {par.dp_rank}": t.contiguous() for name, t in found.items()} if par.is_share_leader else {}


def steps(train_step: TrainStep, numbers: range) -> dict[str, torch.Tensor]:
    """The state after these steps."""
    share = share_of(synthetic(train_step.cfg, 64), train_step)
    for number in numbers:
        train_step.train(share, "rl", number)
    return state(train_step.policy, train_step.adam)


def recorded(train_step: TrainStep) -> dict[str, torch.Tensor]:
    """The state before and after each of three updates, and its gradients, unclipped; by ``<number>/``. For one rank:
    gradients are reduced twice."""
    policy, adam = train_step.policy, train_step.adam
    out: dict[str, torch.Tensor] = {f"0/{name}": t for name, t in state(policy, adam).items()}
    for number in range(1, 4):
        found = gradients(train_step, algorithm_of(train_step.cfg), synthetic(train_step.cfg, 64))
        out |= {f"{number}/grad.{name}": t for name, t in found.items() if "." in name}
        adam.reduce_and_step(train_step.cfg.train.lr)
        out |= {f"{number}/{name}": t for name, t in state(policy, adam).items()}
    return out


def gradients(train_step: TrainStep, algorithm: AlgorithmSpec, batch: Batch) -> dict[str, torch.Tensor]:
    """The gradients that this rank owns, unclipped, and on rank 0 the metrics. ``batch``: of all replicas."""
    par, policy = train_step.par, train_step.policy
    metrics = train_step.gradients(share_of(batch, train_step), algorithm)
    numbers = {name: torch.tensor([value]) for name, value in metrics.items()} if par.rank == 0 else {}
    return numbers | reduced_gradients(policy)


def reduced_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """The gradients that this rank owns, of all replicas."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([policy.ddp])
    grads = owned_tensors(policy, {n: p.main_grad for n, p in policy.parameters()}, BUCKET)
    return {name: t.clone() for _, name, t in grads}


def of_variants(variants: dict[str, dict[str, Any]], policy: Policy, adam: Adam, cfg: Config,
                par: parallel.ParallelDims) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Gradients and metrics of each variant."""
    batch = with_reference(cfg, policy.arch.vocab)
    for variant, settings in variants.items():
        of_variant = with_algorithm(cfg, **settings)
        yield variant, gradients(TrainStep(policy, adam, of_variant, par), algorithm_of(of_variant), batch)


def of_parts(policy: Policy, adam: Adam, cfg: Config, par: parallel.ParallelDims) -> dict[str, torch.Tensor]:
    """Gradients and metrics of each variant, from parts of the batch: some samples, one, and the others, after a first
    part that is given up."""
    batch, out = with_reference(cfg, policy.arch.vocab), dict[str, torch.Tensor]()
    for variant, settings in VARIANTS.items():
        train_step, unclipped = TrainStep(policy, adam, with_algorithm(cfg, **settings), par), dict[str, torch.Tensor]()

        def reduced(lr: float, found: dict[str, torch.Tensor] = unclipped) -> float:
            found |= reduced_gradients(policy)
            return 0.0

        train_step.accumulate(share_of(batch.rows(torch.arange(7)), train_step), 0)
        for part, (start, stop) in enumerate(((0, 40), (40, 41), (41, 64))):
            train_step.accumulate(share_of(batch.rows(torch.arange(start, stop)), train_step), part)
        assert train_step.parts.count == 3
        with mock.patch.object(adam, "reduce_and_step", reduced):
            metrics, passed = train_step.apply(1)
        assert train_step.parts.count == 0
        if par.dp == 1:
            assert passed == Passed.of(batch)
        spread = train_step._spread(share_of(batch, train_step)["advantages"].double())
        assert all(math.isclose(metrics[name], value, rel_tol=1e-9) for name, value in spread.items())
        others = {*spread, "lr", "train_s", "grad_norm"}
        numbers = {name: torch.tensor([v]) for name, v in metrics.items() if name not in others and par.rank == 0}
        out |= {f"{variant}/{name}": t for name, t in (numbers | unclipped).items()}
    return out


def loaded(model: Path, cfg: Config, par: parallel.ParallelDims) -> TrainStep:
    policy = Policy(ModelArch.read(model), cfg, par)
    policy.load_folder(model)
    return TrainStep(policy, Adam(policy, cfg), cfg, par)


def cuts(model: Path, cfg: Config, par: parallel.ParallelDims) -> dict[str, torch.Tensor]:
    """The gradients and metrics of each cut into micro-batches, and the log-probs of the replica's samples as
    "logprobs <row in the batch>"."""
    cfg, out = with_algorithm(cfg, **VARIANTS[ALL]), {}
    for name_of_cut, settings in CUTS.items():
        train_step = loaded(model, with_trainer(cfg, **settings), par)
        batch = with_reference(cfg, train_step.policy.arch.vocab)
        found = gradients(train_step, algorithm_of(cfg), batch)
        outputs = train_step.forward_logprobs(share_of(batch, train_step))
        if par.is_share_leader:
            rows = batch.share_rows(par.dp)[par.dp_rank].tolist()
            found |= {f"logprobs {row}": own.clone() for row, own in zip(
                rows, outputs["logprobs"].split(batch.loss_counts[rows].tolist()), strict=True)}
        out |= {f"{name_of_cut}/{name}": tensor for name, tensor in found.items()}
    return out


def minibatches(model: Path, cfg: Config, par: parallel.ParallelDims) -> dict[str, torch.Tensor]:
    """The state after a step of two passes over three minibatches, as "split/", and after as many steps of one update,
    each with one of those minibatches, as "one by one/"."""
    once = {"updates_per_step": 1, "minibatches": 1, "lr_warmup_steps": 0}
    made = {name: loaded(model, cfg.model_copy(update={"train": cfg.train.model_copy(update=settings)}), par)
            for name, settings in (("split", once | {"updates_per_step": 2, "minibatches": 3}), ("one by one", once))}
    share = share_of(synthetic(cfg, 64), made["split"])
    metrics = made["split"].train(share, "rl", 1)
    for number in (0, 1, 2) * 2:
        last = made["one by one"].train(share.minibatch(number, 3), "rl", 1)
    assert metrics["loss"] == last["loss"] and metrics["grad_norm"] == last["grad_norm"]
    return {f"{name}/{key}": t for name, step in made.items() for key, t in state(step.policy, step.adam).items()}


def signs_of_life(policy: Policy, adam: Adam, cfg: Config, par: parallel.ParallelDims) -> dict[str, torch.Tensor]:
    """What one forward pass and one step of this rank report: as "micro-batches <rank>" how many there are in a pass,
    and as "reports <rank>" what it reported, in order: 1 for a micro-batch, 0 for the time after them, -1 for the
    end."""
    found: list[int] = []
    small = with_trainer(cfg, micro_batch_tokens=40)
    train_step = TrainStep(policy, adam, small, par, lambda phase, work: found.append(int(phase == IN_PASSES)))
    share = share_of(synthetic(small, 64), train_step)
    train_step.forward_logprobs(share)
    found.append(-1)
    train_step.train(share, "rl", 1)
    return {f"reports {par.rank}": torch.tensor(found),
            f"micro-batches {par.rank}": torch.tensor([len(cut(share, small.trainer, train_step.cost))])}


def recompute(model: Path, cfg: Config, par: parallel.ParallelDims) -> dict[str, torch.Tensor]:
    """Gradients and log-probs with each way to recompute, of padded and of packed rows, and the bytes of activations
    that the rank keeps between the passes of a micro-batch, as "saved <rank>"."""
    out: dict[str, torch.Tensor] = {}
    for packing in (False, True):
        for mode in ("none", "selective", "full"):
            settings = {"recompute": mode, "packing": packing, "micro_batch_tokens": 1 << 20}
            train_step = loaded(model, with_trainer(cfg, **settings), par)
            kept = Kept({p.untyped_storage().data_ptr() for _, p in train_step.policy.parameters()})
            with torch.autograd.graph.saved_tensors_hooks(kept.keep, kept.use):
                found = gradients(train_step, algorithm_of(cfg), synthetic(cfg, 64))
            name = f"{mode}{', packed' if packing else ''}"
            out |= {f"{name}/{key}": tensor for key, tensor in found.items()}
            out[f"{name}/saved {par.rank}"] = torch.tensor([float(sum(kept.sizes.values()))])
            outputs = train_step.forward_logprobs(share_of(synthetic(cfg, 64), train_step))
            if par.is_share_leader:
                out[f"{name}/logprobs {par.dp_rank}"] = outputs["logprobs"]
    return out


class Kept:
    """Sizes of what autograd keeps until it first uses any of it. ``not_counted``: addresses of the weights."""

    def __init__(self, not_counted: set[int]) -> None:
        self._not_counted, self._open = not_counted, True
        self.sizes: dict[int, int] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self._open and storage.data_ptr() not in self._not_counted:
            self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        self._open = False
        return tensor


def failing(policy: Policy, adam: Adam, cfg: Config, par: parallel.ParallelDims) -> dict[str, torch.Tensor]:
    """A loss that fails on one rank only, forward or in its backward pass: what each rank raises, as text; then the
    gradients of a loss that does not."""
    spec, batch = ALGOS["grpo"], synthetic(cfg, 64)
    train_step = TrainStep(policy, adam, cfg, par)

    def raises(*args: Any) -> Any:
        if par.rank == par.world - 1:
            raise SystemExit("the loss of the test")
        return spec.token_loss(*args)

    def no_gradient(*args: Any) -> Any:
        loss, stats = spec.token_loss(*args)
        return loss.detach() if par.rank == par.world - 1 else loss, stats

    def not_finite(logp: torch.Tensor, *args: Any) -> Any:
        loss, stats = spec.token_loss(logp, *args)
        # A finite value with an infinite slope.
        return loss + (logp - logp.detach()).abs().sqrt() if par.rank == par.world - 1 else loss, stats

    out: dict[str, torch.Tensor] = {}
    for loss in (raises, no_gradient, not_finite):
        try:
            train_step.gradients(batch.shares(par.dp)[par.dp_rank], replace(spec, token_loss=loss))
        except PluginFailed as e:
            out[f"{loss.__name__} {par.rank}"] = torch.frombuffer(bytearray(str(e).encode()), dtype=torch.uint8)
    return out | gradients(train_step, spec, batch)


def refusing(policy: Policy, adam: Adam, cfg: Config, par: parallel.ParallelDims) -> dict[str, torch.Tensor]:
    """What each rank raises, as text, for samples with which the norm of the gradient is not finite, for a pass with
    too little memory on the last rank, and for a loss that fails in the second part of a step; and of each rank whether
    its state was the same bits after each of them, and was another one after a step that is not refused."""
    cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"updates_per_step": 1})})
    batch, spec = synthetic(cfg, 64), algorithm_of(cfg)
    train_step = TrainStep(policy, adam, cfg, par)
    share = share_of(batch, train_step)
    train_step.train(share, "rl", 1)  # so that there are moments

    def huge(*args: Any) -> Any:  # a finite slope, with which gradients are infinite
        loss, stats = spec.token_loss(*args)
        return loss * 1e25, stats

    def fails(*args: Any) -> Any:
        if par.rank == par.world - 1:
            raise ValueError("the loss of the test")
        return spec.token_loss(*args)

    def with_loss(loss: Any, call: Callable[[], Any]) -> None:
        with mock.patch.object(train_step, "_algorithm", lambda phase: replace(spec, token_loss=loss)):
            call()

    def without_memory(call: Callable[[], Any]) -> None:
        forward, calls = policy.forward, itertools.count()

        def once(micro: ModelInput) -> torch.Tensor:
            if par.rank == par.world - 1 and next(calls) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return forward(micro)

        with mock.patch.object(policy, "forward", once):
            call()

    def second_part_fails() -> None:
        train_step.accumulate(share, 0)
        with_loss(fails, lambda: train_step.accumulate(share, 1))

    def step_of_parts() -> None:
        train_step.accumulate(share, 0)
        with_loss(huge, lambda: train_step.accumulate(share, 1))
        train_step.apply(2)

    attempts: dict[str, Callable[[], Any]] = {
        "update": lambda: with_loss(huge, lambda: train_step.train(share, "rl", 2)),
        "check": lambda: with_loss(huge, lambda: train_step.check(share, "rl")),
        "apply": step_of_parts, "second part": second_part_fails}
    if par.passes_alone:
        attempts["memory"] = lambda: without_memory(lambda: train_step.train(share, "rl", 2))
        attempts["memory of a pass"] = lambda: without_memory(lambda: train_step.forward_logprobs(share))
    before, out = state(policy, adam), dict[str, torch.Tensor]()
    for name, attempt in attempts.items():
        try:
            attempt()
        except (StepRefused, PluginFailed) as e:
            text = f"{type(e).__name__}: {e}".encode()
            out[f"{name} {par.rank}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        out[f"left of {name} {par.rank}"] = torch.tensor([train_step.parts.count, adam.updates])
        out[f"same after {name} {par.rank}"] = torch.tensor([_same(before, state(policy, adam))])
    found = train_step.check(share, "rl")
    out[f"same after a good check {par.rank}"] = torch.tensor([_same(before, state(policy, adam))])
    nothing = train_step.check(share_of(collate_answers([Prompt((1,), answer_ids=())]), train_step), "sft")
    assert (nothing["grad_norm"], nothing["tokens"]) == (0.0, 0.0), "of one token without an answer nothing is learned"
    trained = train_step.train(share, "rl", 2)
    assert trained["grad_norm"] == found["grad_norm"] and trained["loss"] == found["loss"]
    out[f"changed {par.rank}"] = torch.tensor([not _same(before, state(policy, adam))])
    return out


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def frozen(policy: Policy, adam: Adam, cfg: Config, par: parallel.ParallelDims) -> dict[str, torch.Tensor]:
    """Two steps of one update with the divergence from the policy before them, in buckets that cut its tensors. Of each
    rank, whether the reference's log-probs and then the policy's weights were the same bits as before; on rank 0 the
    metrics of each step."""
    cfg = with_algorithm(cfg, kl_coef=0.5)
    cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"updates_per_step": 1})})
    kept, train_step = Reference(policy, None, 100), TrainStep(policy, adam, cfg, par)
    share = with_reference(cfg, policy.arch.vocab).shares(par.dp)[par.dp_rank]
    kept.renew(Progress("rl"))
    began_with = train_step.forward_logprobs(share)["logprobs"]
    out: dict[str, torch.Tensor] = {}
    same = []
    for step in (1, 2):
        own = [p.detach().clone() for _, p in policy.parameters()]
        with kept.in_place():
            logprobs = train_step.forward_logprobs(share, greedy=False)["logprobs"]
        same += [torch.equal(logprobs, began_with),
                 all(torch.equal(a, b) for a, (_, b) in zip(own, policy.parameters(), strict=True))]
        metrics = train_step.train(share.with_tensors(ref_logprobs=logprobs), "rl", step)
        if par.rank == 0:
            out |= {f"{name} {step}": torch.tensor([v]) for name, v in metrics.items() if name != "train_s"}
    return out | {f"same bits {par.rank}": torch.tensor(same)}


def drift(kl_coef: float, policy: Policy, adam: Adam, cfg: Config, par: parallel.ParallelDims
          ) -> dict[str, torch.Tensor]:
    """On rank 0 the divergence from the policy before ten steps on the same batch."""
    cfg = with_algorithm(cfg, kl_coef=kl_coef, report_kl=True)
    kept, train_step = Reference(policy, None, BUCKET), TrainStep(policy, adam, cfg, par)
    share, metrics = synthetic(cfg, 64).shares(par.dp)[par.dp_rank], dict[str, float]()
    kept.renew(Progress("rl"))
    for step in range(1, 11):
        with kept.in_place():
            logprobs = train_step.forward_logprobs(share, greedy=False)["logprobs"]
        metrics = train_step.train(share.with_tensors(ref_logprobs=logprobs), "rl", step)
    return {"kl_reference": torch.tensor([metrics["kl_reference"]])} if par.rank == 0 else {}
