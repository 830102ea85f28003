"""The distributed checkpoint service."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import PathText, Positive, Seconds, Section


class Stream(StrEnum):
    """The streams of versions that a job publishes."""

    POLICY = "policy"
    """Weights that engines serve."""
    TRAINER_STATE = "trainer_state"
    """What a trainer resumes from: weights, optimizer, random states, position in the data."""
    CRITIC = "critic"
    """Weights of the value model, of a job that has one."""
    CRITIC_STATE = "critic_state"
    """What the critic's group resumes from."""
    RUN_LOG = "run_log"
    """The records of the run: a tensor of bytes for each sealed segment."""
    MODEL = "model"
    """The files of the model's folder but for its weights: a tensor of bytes for each file."""


Replicas = Literal["auto"] | Positive


class DcsConfig(Section):
    host: str = "127.0.0.1"
    """Address that a DCS node listens on; 0.0.0.0 for all addresses of the host, which needs ``advertise_host``.
    127.0.0.1 stands for the host's address where that has one (``up --address``)."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port that the node listens on; 0: a free one."""
    advertise_host: str = ""
    """Host name or address under which other hosts reach the node. Empty: ``host``. Set it for 0.0.0.0, NAT or
    containers."""
    advertise_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port under which other hosts reach the node; 0: the one that it listens on."""
    io_timeout_s: Seconds = 30.0
    """Seconds that one answer of a node may take."""

    arena_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)] = 256 << 20
    """Size of a node's shared-memory arena (/dev/shm), in bytes. It must hold the versions that are being published and
    pulled; without a disk (``disk_bytes``), every version that is kept."""
    chunk_bytes: Annotated[int, Field(ge=4096)] = 4 << 20
    """Largest size of a chunk, in bytes; tensors are cut into chunks of this size."""
    digest: Literal["xxh3-128", "blake3"] = "xxh3-128"
    """Digest that names and verifies chunks. ``xxh3-128`` detects accidental corruption; ``blake3``, which is slower,
    forged chunks too."""
    disk_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Bytes of disk that a node may use: a copy of every committed chunk, so that a restarted node still has them, and
    the chunks that do not fit into the arena. 0: memory only."""
    disk_dir: PathText = ""
    """Folder for the chunks on disk, one subfolder a node. Empty: one in the job's folder."""
    verify_every_s: Annotated[float, Field(ge=0)] = 60.0
    """A node verifies a chunk's digest again before it serves the chunk when the last verification is more than this
    many seconds ago. 0: every time."""

    replicas: Replicas = "auto"
    """Number of nodes that must hold every chunk before a version is committed. One fewer may fail without loss.
    ``auto``: two where there are two, so that the loss of a host loses no version; with one alone a version is
    committed all the same, and gets its other copy once there is a second node."""
    staging_ttl_s: Annotated[int, Field(ge=2)] = 10
    """Time to live, in seconds, of a publisher's lease. When the lease ends, the version that it was publishing is
    aborted."""
    orphan_grace_s: Annotated[float, Field(ge=0)] = 15.0
    """Seconds for which a node keeps the chunks of a publisher whose connection ended before the commit. Larger than
    ``staging_ttl_s``, since the version may still be committed until then; or 0 to drop them at once, where no
    publisher commits after its connection ended (tests)."""
    unknown_version_grace_s: Annotated[float, Field(ge=0)] = 86400.0
    """Seconds for which a node keeps the chunks of a committed version that the catalog has no record of, though it did
    not release it: time to find out what happened to etcd, and to run ``elastic-rl versions recover``."""
    bucket_bytes: Annotated[int, Field(ge=4096)] = 64 << 20
    """Bytes of weights that the trainer gathers at once for a publish. A rank needs memory for at most two of these
    beside its own shards."""
    publish_timeout_s: Seconds = 120.0
    """Seconds that a publish may take; it is then dropped, with an event."""
    pin_ttl_s: Annotated[int, Field(ge=2)] = 30
    """Time to live, in seconds, of a puller's pin, which keeps a version from being released while it is pulled."""

    max_parallel_fetches: Positive = 8
    """Largest number of chunks that a node fetches from others at once."""
    hedge_after_s: Seconds = 1.0
    """A chunk that a node has not delivered within this many seconds is requested from another one as well, unless
    fetches usually take that long."""
    max_sends: Positive = 32
    """Largest number of chunks that a node sends at once; further requests wait."""
    max_sends_per_peer: Positive = 8
    """Largest number of chunks that a node sends to one peer at once; further requests of that peer wait."""
    delta: bool = True
    """Whether nodes send one another only what changed against a chunk that the receiver has, where that is smaller."""

    keep_versions: Positive = 4
    """Number of committed versions kept of each stream, besides pinned ones. The newest is always kept."""
    keep_age_s: Annotated[float, Field(ge=0)] = 0.0
    """Committed versions that are older than the newest one of their stream by more seconds than this are released even
    within ``keep_versions``. 0: no limit."""
    keep_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of committed versions kept of each stream; the oldest beyond it are released even within ``keep_versions``,
    except the newest. 0: no limit."""

    durable_url: str = ""
    """Durable store that committed versions are copied to: an fsspec URL, such as s3://bucket/path or
    file:///mnt/ckpt. Empty: no version is copied."""
    durable_streams: list[Stream] = [Stream.POLICY, Stream.TRAINER_STATE, Stream.CRITIC_STATE, Stream.RUN_LOG]
    """Streams that are copied to ``durable_url``, in turns. The states of policy and critic are copied in pairs."""
    durable_keep_versions: Positive = 3
    """Number of versions kept of each stream at ``durable_url``, besides the newest states of policy and critic that
    belong together, and the policies that are the reference of what is kept (``reference.enabled``), which are copied
    also where ``durable_streams`` does not name the policy."""
    durable_full_every: Positive = 8
    """Every n-th copy at ``durable_url`` holds the whole version; those between hold what changed against it. 1: every
    copy is whole."""

    tls_cert: PathText = ""
    """PEM file with the certificate (chain) of the node. With ``tls_key`` and ``tls_ca``, nodes and their clients speak
    TLS and verify each other."""
    tls_key: PathText = ""
    """PEM file with the private key of ``tls_cert``."""
    tls_ca: PathText = ""
    """PEM file of the authority that the certificates of all nodes and clients must come from."""
    token_file: PathText = ""
    """File with the secret that clients of the nodes must present. Empty: one that is derived from the
    cluster's secret."""
