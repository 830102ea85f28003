"""The distributed checkpoint service."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Positive, Seconds, Section


class Stream(StrEnum):
    """The streams of versions that a job publishes."""

    POLICY = "policy"
    """Weights that engines serve."""
    TRAINER_STATE = "trainer_state"
    """What a trainer resumes from: weights, optimizer, random states, position in the data."""


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
    unknown_version_grace_s: Annotated[float, Field(ge=0)] = 86400.0
    """How long a node keeps the chunks of a committed version that the catalog has no record of, though it did not
    release it: time to find out what happened to etcd, and to run `elastic-rl versions recover`."""
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
    durable_streams: list[str] = [Stream.POLICY, Stream.TRAINER_STATE]
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
