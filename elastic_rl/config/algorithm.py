"""The RL algorithm: what every one has. Each declares further options where it is defined (``algorithms/``)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from elastic_rl.config.options import require_options
from elastic_rl.config.pools import PoolName
from elastic_rl.config.section import Positive, Section


def reference_step(step: int, every: int | None) -> int:
    """The RL step whose policy is the reference in RL step ``step``, counted from 1; 0: the policy with which RL began.
    ``every``: ``algorithm.reference_every_steps``. Raises ValueError for a step below 1."""
    if step < 1:
        raise ValueError(f"steps count from 1, got {step}")
    return (step - 1) // every * every if every else 0


Aggregate = Literal["token", "sequence", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
NotNegative = Annotated[float, Field(ge=0)]


class AlgorithmConfig(Section):
    name: str = "grpo"
    """Name of the algorithm: ``grpo`` (arXiv:2402.03300), ``dapo`` (arXiv:2503.14476), ``dr_grpo`` (arXiv:2503.20783),
    ``gspo`` (arXiv:2507.18071), ``sapo`` (arXiv:2511.20347), ``cispo`` (arXiv:2506.13585), ``rloo`` (arXiv:2402.14740),
    ``reinforce_pp`` and ``reinforce_pp_baseline`` (arXiv:2501.03262), ``ppo`` (arXiv:1707.06347, with
    the critic of the section ``critic``), ``on_policy_distillation`` (arXiv:2306.13649; it needs a ``teacher``), or
    your own ``AlgorithmSpec`` as ``package.module:name``."""
    options: dict[str, Any] = {}
    """Options of the algorithm, such as ``clip_high`` of ``dapo`` or ``gae_lambda`` of ``ppo``: the page
    docs/algorithms.md has those of each. One of your own has those that its ``AlgorithmSpec`` declares."""
    aggregate: Aggregate | None = None
    """How the losses of tokens become the loss of a batch. ``token``: the mean over all tokens, so that long responses
    count more (DAPO). ``sequence``: the mean over samples of each one's mean (GRPO as published). ``constant``: the sum
    over a sample's tokens divided by ``constant_length_tokens``, and the mean of that over samples (Dr. GRPO). null:
    what the algorithm has."""
    constant_length_tokens: Positive | None = None
    """Number of tokens that each sample's sum is divided by with ``aggregate: constant``, whatever its length; most
    often the longest possible response. It scales the gradient, which ``train.max_grad_norm`` then limits."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Number of tokens before the longest possible response over which a sample's reward is lowered, on a line from 0
    to ``overlong_penalty``: DAPO's overlong reward shaping. 0: rewards do not depend on lengths. Filters, and the
    rewards that are reported, have the rewards without it."""
    overlong_penalty: NotNegative = 1.0
    """What the reward of a response of full length is lowered by, where ``overlong_buffer_tokens`` is not 0."""
    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """Truncated importance sampling: each token's loss is multiplied by the ratio of the trainer's probability of the
    token before the step to the engine's, of at most this; 2 is usual. Ratios of the policy loss are then those of the
    trainer to itself before the step, which with more than one of ``train.updates_per_step`` costs a forward pass over
    the batch, by the trainer's ranks or with ``actor_fwd.enabled`` by others. null: off, and ratios are those of the
    trainer to the engine."""
    kl_coef: NotNegative = 0.0
    """Weight of the divergence from the reference policy, the policy with which RL began. Above 0 each trainer rank
    keeps the reference's weights in host memory, and each step takes another forward pass over its batch; both not with
    ``reference.enabled``."""
    kl_estimator: KlEstimator | None = None
    """How the divergence from the reference policy is estimated from a token's log-probs: ``k1``, the log-ratio, for
    rewards; ``k2``, half its square, and ``k3``, GRPO's, for the loss. null: ``k1`` with ``kl_in: reward``, else
    ``k3``."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence from the reference policy is added: to the loss of each token, with the trainer's log-probs;
    or to the reward of each sample, which it lowers by the sum over the sample's tokens, with the log-probs that they
    were sampled with (arXiv:2203.02155). Filters, and the rewards that are reported, have the rewards without it."""
    report_kl: bool = False
    """Whether the divergence from the reference policy is a metric of each step also where ``kl_coef`` is 0, at the
    same cost."""
    reference_every_steps: Positive | None = None
    """Number of RL steps after which the policy of that time becomes the reference policy, again and again. null: the
    policy with which RL began is the reference throughout."""
    teacher: PoolName | None = None
    """Pool whose model is the teacher, for ``on_policy_distillation`` and ``teacher_top_k``: its engines score each
    sample. It must have the policy's tokens, and is compared with the policy at temperature 1. null: none."""
    teacher_coef: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the divergence from the teacher."""
    teacher_top_k: Annotated[int, Field(ge=0, le=256)] = 0
    """Number of the teacher's most probable tokens at each place whose log-probs it gives. With them the reverse
    divergence from the teacher is a term of the loss, in which all other tokens count as one; of any algorithm. 0: the
    divergence is estimated from the sampled tokens alone, by the advantages of ``on_policy_distillation``."""
    entropy_coef: float = 0.0
    """Weight of the entropy of the policy's distribution at each trained token, which is subtracted from its loss:
    above 0 it keeps the policy exploring. Other than 0, it takes memory for two more copies of a micro-batch's logits
    at those tokens."""
    report_entropy: bool = False
    """Whether the entropy is a metric of each step also where ``entropy_coef`` is 0. It costs another pass over the
    logits at the trained tokens, without a gradient."""

    @field_validator("options")
    @classmethod
    def _require_json(cls, options: dict[str, Any]) -> dict[str, Any]:
        return require_options(options)

    @property
    def estimator(self) -> KlEstimator:
        """``kl_estimator``, or what follows from ``kl_in``."""
        return self.kl_estimator or ("k1" if self.kl_in == "reward" else "k3")

    @property
    def measures_kl(self) -> bool:
        """Whether the divergence from a reference policy is estimated: as a term of the loss or the reward, or only as
        a metric."""
        return self.kl_coef > 0 or self.report_kl
