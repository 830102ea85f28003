"""Every setting of a run: typed, documented, in one place. One YAML file, each key also ``--key.sub=value``.

Names carry their unit (``_s`` seconds, ``_bytes`` bytes). An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from elastic_rl import config_reading

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A frozen group of settings that knows no other keys than its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class DeviceConfig(Section):
    type: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; ``auto`` takes CUDA when torch sees one."""
    dist_backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collectives of the trainer; ``auto``: nccl on CUDA, gloo on a CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter dtype of trainer and engines."""
    layer_spec: Literal["auto", "local", "te"] = "auto"
    """Megatron layer spec; ``auto``: Transformer Engine on CUDA, local on a CPU."""


class EtcdConfig(Section):
    endpoints: list[str] = []
    """``host:port`` of the members of an etcd that someone else runs. Empty: ``elastic-rl up`` starts one member."""
    call_timeout_s: Seconds = 0.5
    """Deadline of one attempt on one member."""
    retry_budget_s: Seconds = 15.0
    """How long a call goes from member to member before it raises StoreUnavailable."""
    start_timeout_s: Seconds = 20.0
    """How long ``up`` waits for an etcd that it started."""

    tls_ca: str = ""
    """PEM file of the authority that signed the members' certificates; set: every connection to etcd is TLS."""
    tls_cert: str = ""
    """PEM file with this client's certificate, for an etcd with ``--client-cert-auth``."""
    tls_key: str = ""
    """PEM file with its key."""
    tls_server_name: str = ""
    """Name that the members' certificates are for, where it is not the one in ``endpoints``."""
    user: str = ""
    """User of an etcd with authentication; needs read and write on the prefix ``/elastic_rl/``."""
    password_file: str = ""
    """Text file with the user's password; read at each sign-in, so that a new password needs no restart."""

    @model_validator(mode="after")
    def _fits_together(self) -> EtcdConfig:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key belong together")
        if not self.tls_ca and (self.tls_cert or self.tls_server_name):
            raise ValueError("tls_cert and tls_server_name need tls_ca, the authority of the members' certificates")
        if bool(self.user) != bool(self.password_file):
            raise ValueError("user and password_file belong together")
        if (self.tls_ca or self.user) and not self.endpoints:
            raise ValueError("tls_ca and user are for an etcd that someone else runs: set endpoints")
        return self


class CoordinatorConfig(Section):
    replicas: Positive = 2
    """Coordinator processes that ``up`` starts; one leads."""
    host: str = "127.0.0.1"
    """Address the admin API binds."""
    ports: list[int] = []
    """One port a replica; empty: free ports are chosen."""
    lease_ttl_s: Annotated[int, Field(ge=2)] = 3
    """Time to live of leader and member leases; a dead process is noticed within it."""
    hang_factor: Annotated[float, Field(gt=1)] = 10.0
    """A member counts as hung when it was silent for so many times as long as is usual in what it does ..."""
    hang_floor_s: Seconds = 30.0
    """... but not sooner than this ..."""
    hang_ceiling_s: Seconds = 600.0
    """... and not later; the only limit of a phase that was not seen three times yet. Longer than any bounded wait."""
    reconcile_interval_s: Seconds = 0.5
    """Longest pause between two looks at desired against actual."""
    events_keep: Positive = 2000
    """Events kept in etcd; older ones are trimmed by the leader."""
    steps_keep: Annotated[int, Field(ge=100)] = 2000
    """Points of the run's curves kept in etcd; the leader thins out old ones, evenly."""
    max_engines: Positive = 64
    """Largest number of engines that the API accepts for a pool."""
    require_token: bool | None = None
    """Bearer tokens needed; unset: only off on loopback."""
    advertise_host: str = ""
    """Name or address under which others reach the admin API where it is not the one that it binds; with TLS, one that
    its certificate is for."""
    tls_cert: str = ""
    """PEM certificate (chain) of the admin API; with ``tls_key`` it speaks TLS only."""
    tls_key: str = ""
    tls_ca: str = ""
    """PEM file of the authority by which replicas and our own clients check it; empty: the system's authorities."""
    max_requests: Positive = 128
    """Requests that a replica works on at once; it refuses further ones until there is room."""
    max_streams: Positive = 64
    """Event streams that a replica keeps open."""
    max_body_bytes: Positive = 65536
    """Largest body of a request."""
    request_timeout_s: Seconds = 10.0
    """A request whose headers or body take longer to arrive is given up."""

    @property
    def scheme(self) -> str:
        """Of the admin API's URLs."""
        return "https" if self.tls_cert else "http"


class PolicyConfig(Section):
    """Budgets of the failure policy (coordinator/policy.py)."""

    budget: Positive = 5
    """Faults of one part (the trainer group, a role) within ``window_s`` that are mended in place; one more is a global
    restart."""
    window_s: Seconds = 600.0
    backoff_s: Seconds = 2.0
    """Pause before the second restart of a part; it doubles with each further one ..."""
    backoff_max_s: Seconds = 300.0
    """... up to this."""
    settle_s: Seconds = 10.0
    """Faults of one part that come within this time of each other are one."""
    stop_after: Annotated[int, Field(ge=2)] = 4
    """Global restarts without progress in between after which the run is stopped."""


class AlertRoute(Section):
    """Who gets some of the alerts."""

    url: str
    """Apprise URL."""
    tags: list[str] = []
    """It gets alerts that have one of these tags; none: every alert. An alert has the tags of its severity
    (``alerts.tags``), its kind, such as ``engine.dead``, and the kind's first part, such as ``engine``."""
    name: str = ""
    """What the receiver is called in records and answers; empty: made from the URL, without what is secret in it."""


class AlertConfig(Section):
    urls: list[str] = []
    """Apprise URLs that get every alert."""
    routes: list[AlertRoute] = []
    """Apprise URLs that get some alerts, by tags: a pager only errors, a chat all."""
    config_file: str = ""
    """An Apprise configuration file (YAML or text) with more URLs and their tags, which mean the same as in
    ``routes``; its tag ``always`` means every alert."""
    tags: dict[Literal["info", "warning", "error"], list[str]] = {
        "info": ["info"], "warning": ["warning"], "error": ["error", "critical"]}
    """Apprise tags of an alert by its severity; a severity that is not named here has its own name."""
    timeout_s: Seconds = 4.0
    """Longest wait for one notification service."""
    group_wait_s: Annotated[float, Field(ge=0)] = 2.0
    """A message waits so long for other alerts of the same moment; they then are one message."""
    messages_per_minute: Positive = 10
    """Messages to one receiver, repetitions included. What comes faster waits, and is told together."""

    engine_lag_versions: Positive = 8
    """An engine so many policy versions behind the head is an alert."""
    engine_lag_s: Seconds = 120.0
    """And one that for so long has not had a version that was there."""
    durable_lag_s: Seconds = 900.0
    """A stream of which no newer version became durable for so long, though there is one, is an alert."""
    full_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """A node's disk (its arena, where it has no disk) that is fuller than this is an alert."""
    leaderless_s: Seconds = 15.0
    """When nobody led for longer than this, the next leader tells of it."""
    etcd_slow_s: Seconds = 0.5
    """An etcd whose reads take longer than this, for 30 s, is an alert."""
    etcd_quota_bytes: Positive = 2 << 30
    """etcd's ``--quota-backend-bytes`` (its default); a database larger than ``full_fraction`` of it is an alert."""


class TelemetryConfig(Section):
    otlp_endpoint: str = ""
    """OTLP/HTTP endpoint for traces, such as http://collector:4318; empty: tracing is off."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of every process's log."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Who else is told the metrics of training, in folders of these names in the job's folder; W&B offline. Needs the
    extra ``track``."""


class DcsConfig(Section):
    host: str = "127.0.0.1"
    """Address a DCS node binds."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the node; 0: a free one."""
    advertise_host: str = ""
    """Address under which others reach the node where it is not the one that it binds (0.0.0.0, NAT, containers)."""
    advertise_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """And the port; 0: the one that it binds."""
    io_timeout_s: Seconds = 30.0
    """Longest wait for one answer of a node."""

    arena_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Shared-memory arena of a node."""
    chunk_bytes: Annotated[int, Field(ge=4096)] = 4 << 20
    """Largest chunk; tensors are cut at this size."""
    digest: Literal["xxh3-128", "blake3"] = "xxh3-128"
    """Names and checks chunks: xxh3-128 against accidents, blake3 (slower) also against forgery."""
    disk_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Disk that a node may fill with chunks: those that the arena has no room for, and a copy of every committed one,
    so that a restarted node has them again. 0: memory only."""
    disk_dir: str = ""
    """Folder for them, one subfolder a node; empty: in the cluster's folder."""
    verify_every_s: Annotated[float, Field(ge=0)] = 60.0
    """A chunk that a node verified longer ago than this is verified again before it is handed out; 0: each time."""

    replicas: Positive = 1
    """Nodes that hold every chunk before a version counts as committed."""
    staging_ttl_s: Annotated[int, Field(ge=2)] = 10
    """Lease of a publish in progress; when it ends the version is aborted."""
    orphan_grace_s: Annotated[float, Field(ge=0)] = 15.0
    """How long the chunks of a publisher that died stay; longer than ``staging_ttl_s``."""
    bucket_bytes: Annotated[int, Field(ge=4096)] = 64 << 20
    """Weights that the trainer gathers at once; a rank holds at most two of these more than its own shards."""
    publish_timeout_s: Seconds = 120.0
    """A publish that is not committed by then is dropped, on the record."""
    pin_ttl_s: Annotated[int, Field(ge=2)] = 30
    """Lease of a puller's pin."""

    fetch_parallel: Positive = 8
    """Chunks that a node fetches from others at once."""
    hedge_after_s: Seconds = 1.0
    """A chunk that a peer has not delivered by then is asked of another one too."""
    max_sends: Positive = 32
    """Chunks that a node sends at once; further requests wait, and those over ``peer_sends`` of one peer too."""
    peer_sends: Positive = 8
    """Chunks that a node sends to one peer at once."""
    delta: bool = True
    """Between nodes, send what changed against a chunk that the receiver has, where that is smaller."""

    keep_versions: Positive = 4
    """Committed versions kept a stream, beyond those that are pinned."""
    keep_age_s: Annotated[float, Field(ge=0)] = 0.0
    """Committed versions older than this are released too, but for the head; 0: no limit."""
    keep_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of committed versions kept a stream, the head always; 0: no limit."""

    durable_url: str = ""
    """fsspec URL, such as s3://bucket/path or file:///mnt/ckpt, to which committed versions are copied; empty: none."""
    durable_streams: list[str] = ["policy", "trainer_state"]
    """Streams that are copied there."""
    durable_keep: Positive = 3
    """Versions kept there a stream."""
    durable_anchor_every: Positive = 8
    """Every how many-th copied version is whole; those between hold only what changed against it."""

    tls_cert: str = ""
    """PEM certificate of the node; with ``tls_key`` and ``tls_ca`` nodes and their clients speak TLS."""
    tls_key: str = ""
    tls_ca: str = ""
    """PEM file of the authority that every node's certificate must come from."""
    token_file: str = ""
    """File with the secret that clients of nodes must know; empty: ``up`` makes one for the job."""


class ModelConfig(Section):
    path: str = ""
    """Folder of an HF model to start from; empty: a tiny one of the shape below is made from the seed."""
    hidden_size: Positive = 64
    intermediate_size: Positive = 192
    num_layers: Positive = 2
    num_heads: Positive = 4
    num_kv_heads: Positive = 2
    head_dim: Positive = 16
    max_positions: Positive = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class DataConfig(Section):
    task: Literal["addition"] = "addition"
    """Generated prompts with a verifiable answer."""
    operand_below: Annotated[int, Field(ge=5, le=500)] = 100
    """Operands are drawn from [0, this)."""
    answer_order: Literal["reversed", "normal"] = "reversed"
    """``reversed``: answers are written least significant digit first, so that a carry is known when it is needed."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=0.9)] = 0.1
    """Share of all problems that is never trained on. With many fewer than 9,000 to train on, some seeds learn those by
    heart and stay near 0.85 on the others."""


class WarmupConfig(Section):
    target_heldout: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Supervised warm-up ends once the held-out accuracy reaches this; RL does the rest."""
    max_steps: Annotated[int, Field(ge=0)] = 3000
    batch_size: Positive = 64
    lr: float = 1e-3
    eval_every_steps: Positive = 5
    """Held-out accuracy is taken this often; it can jump by 0.1 in five steps, so rarer looks overshoot the target."""


class TrainerConfig(Section):
    tensor_parallel: Positive = 2
    pipeline_parallel: Positive = 1
    """Stages that the layers are divided into, evenly."""
    data_parallel: Positive = 1
    micro_batch_size: Positive = 512
    """Sequences a rank puts through the model at once."""
    max_restarts: Positive = 10
    """Re-formations of the trainer group before the run stops and alerts."""
    collective_timeout_s: Seconds = 60.0
    """A collective that takes longer ends the rank; the group then re-forms."""
    start_timeout_s: Seconds = 120.0
    step_timeout_s: Seconds = 120.0
    """Longest wait of the controller for one train step."""

    @property
    def ranks(self) -> int:
        """Processes of the trainer group."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


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


class RolloutConfig(Section):
    engines: Annotated[int, Field(ge=1)] = 2
    """Engines that the pool starts with; change it later with ``elastic-rl scale``."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    retries: Positive = 4
    """Attempts for a prompt group before its step fails."""
    ready_timeout_s: Seconds = 240.0
    """Longest wait for an engine that serves the version a step needs."""


class AlgorithmConfig(Section):
    name: Literal["grpo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Asymmetric clip of the importance ratio (DAPO, arXiv:2503.14476)."""
    normalize_std: bool = True
    """Divide the group-centred reward by its standard deviation (GRPO, arXiv:2402.03300)."""


class TrainConfig(Section):
    steps: Annotated[int, Field(ge=1)] = 400
    """Steps of RL at most; most seeds are done after half of them (``stop_heldout``)."""
    stop_heldout: Annotated[float, Field(gt=0)] | None = 0.95
    """RL ends once two evaluations in a row are at least this; unset (null): never before ``steps``."""
    prompts_per_step: Positive = 64
    group_size: Annotated[int, Field(ge=2)] = 8
    """Samples of one prompt; their rewards are compared with one another."""
    updates_per_step: Positive = 2
    """Optimiser updates on one batch of experience; the second and later ones are off-policy and clipped."""
    lr: float = 1e-3
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 20
    """RL steps over which the rate rises on a line to its value. Adam's moments start from zero here, and at the full
    rate its first updates, all of nearly ``lr`` an element, undo what the supervised warm-up taught."""
    lr_decay: Literal["linear", "constant"] = "linear"
    """``linear``: from ``lr`` at the first step to ``lr_final_fraction`` of it at the last one; what the noise of the
    sampled groups shakes loose early then settles."""
    lr_final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of ``lr`` that is left at the last step."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    eval_every_steps: Positive = 20
    state_every_steps: Positive = 10
    """Optimizer, RNG and data cursor are committed every so many steps; at most that many are done again."""
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Versions a sample may lie behind the trainer; 0 is sync mode."""
    logprob_tolerance: float = 1e-4
    """Largest difference between an engine's and the trainer's log-prob of the same token that is not an alert."""


class Config(Section):
    """The whole configuration of a job."""

    job: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "quickstart"
    """Name of the job: the prefix of its keys in etcd."""
    seed: Annotated[int, Field(ge=0)] = 0
    run_dir: Path = Path("runs")
    """Reports go to ``<run_dir>/<job>``; logs, pids and addresses of the cluster to ``<run_dir>/<job>/cluster``."""
    device: DeviceConfig = DeviceConfig()
    etcd: EtcdConfig = EtcdConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    policy: PolicyConfig = PolicyConfig()
    alerts: AlertConfig = AlertConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    dcs: DcsConfig = DcsConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    warmup: WarmupConfig = WarmupConfig()
    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        tp = self.trainer.tensor_parallel
        for name, n in (("model.num_heads", self.model.num_heads), ("model.num_kv_heads", self.model.num_kv_heads)):
            if n % tp:
                raise ValueError(f"{name}={n} is not a multiple of trainer.tensor_parallel={tp}")
        if self.dcs.host in ("", "0.0.0.0", "::") and not self.dcs.advertise_host:
            raise ValueError(f"dcs.host={self.dcs.host!r} is no address to reach a node at: set dcs.advertise_host")
        if self.model.num_layers % self.trainer.pipeline_parallel:
            raise ValueError(f"model.num_layers={self.model.num_layers} is not a multiple of "
                             f"trainer.pipeline_parallel={self.trainer.pipeline_parallel}")
        if self.train.prompts_per_step % self.trainer.data_parallel:
            raise ValueError("train.prompts_per_step must be a multiple of trainer.data_parallel")
        if any(tls := (self.dcs.tls_cert, self.dcs.tls_key, self.dcs.tls_ca)) and not all(tls):
            raise ValueError("dcs.tls_cert, dcs.tls_key and dcs.tls_ca belong together: set all three or none")
        if bool(self.coordinator.tls_cert) != bool(self.coordinator.tls_key):
            raise ValueError("coordinator.tls_cert and coordinator.tls_key belong together: set both or none")
        if self.coordinator.tls_ca and not self.coordinator.tls_cert:
            raise ValueError("coordinator.tls_ca is of no use without coordinator.tls_cert and coordinator.tls_key")
        ports = self.coordinator.ports
        if ports and len(ports) != self.coordinator.replicas:
            raise ValueError(f"coordinator.ports names {len(ports)} ports for {self.coordinator.replicas} replicas")
        return self

    @property
    def job_dir(self) -> Path:
        """Folder of everything this job writes."""
        return self.run_dir / self.job

    @property
    def cluster_dir(self) -> Path:
        """Folder of the cluster's logs, pids and addresses."""
        return self.job_dir / "cluster"

    @property
    def ray_dir(self) -> Path:
        """Ray's folder of the job: short, since Ray puts sockets below it, whose paths are limited to 107 bytes."""
        name = hashlib.sha256(str(self.cluster_dir.resolve()).encode()).hexdigest()[:8]
        return Path(tempfile.gettempdir()) / f"erl-{name}"


def load(path: Path | str | None = None, overrides: Iterable[str] = ()) -> Config:
    """Reads a YAML file and applies ``key.sub=value`` overrides (a leading ``--`` is allowed; values are YAML).

    Raises ConfigError, which names the file or the key and, for an unknown key, the nearest known one.
    """
    return parse(config_reading.values(path, overrides))


def parse(values: Mapping[str, Any]) -> Config:
    """Validates a nested mapping. Raises ConfigError with every fault in it."""
    return config_reading.validate(Config, values)
