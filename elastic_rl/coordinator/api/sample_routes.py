"""The route that lists samples: what the model wrote, with its rewards."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Response

from elastic_rl.coordinator.api import pages, route_docs
from elastic_rl.coordinator.api.context import JobCtx
from elastic_rl.coordinator.api.models import SamplePage
from elastic_rl.coordinator.api.pages import After, Limit
from elastic_rl.coordinator.api.route_docs import described
from elastic_rl.coordinator.api_paths import OF_JOB
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.records import SampleRecord

_SCANNED = 200
"""Records that are read; the ring has fewer."""
_LARGEST = (1 << 53) - 1

Place = tuple[int, int, int]


def install(app: FastAPI) -> None:
    """Adds the route."""
    app.get(OF_JOB + "/samples", response_model=SamplePage, **described(route_docs.SAMPLES))(list_samples)


def list_samples(ctx: JobCtx, limit: Limit = 100, after: After = "",
                 step: Annotated[int | None, Query(ge=0, le=_LARGEST, description="Only of this step.")] = None,
                 group: Annotated[int | None, Query(
                     ge=0, le=_LARGEST, description="Only of this prompt group.")] = None,
                 min_reward: Annotated[float | None, Query(
                     allow_inf_nan=False, description="Only with at least this reward.")] = None,
                 max_reward: Annotated[float | None, Query(
                     allow_inf_nan=False, description="Only with at most this reward.")] = None,
                 finish_reason: Annotated[str | None, Query(
                     max_length=64, description="Only those that ended so, such as ``length``.")] = None) -> Response:
    """The newest step first, then by prompt group and index. A few samples of each of the last steps are kept."""
    found = ctx.replica.etcd.page(ctx.keys.samples_prefix(), limit=_SCANNED).kvs
    below = _place(after) if after else None
    samples = sorted((_order(s), kv.value) for s, kv in readable(found, SampleRecord)
                     if (step is None or s.step == step) and (group is None or s.group == group)
                     and (min_reward is None or (s.reward is not None and s.reward >= min_reward))
                     and (max_reward is None or (s.reward is not None and s.reward <= max_reward))
                     and (finish_reason is None or s.finish_reason == finish_reason)
                     and (below is None or _order(s) > below))
    shown = samples[:limit]
    rest = ":".join(map(str, shown[-1][0])) if len(samples) > limit else None
    return pages.page([value for _, value in shown], rest)


def _order(sample: SampleRecord) -> Place:
    return -sample.step, sample.group, sample.index


def _place(after: str) -> Place:
    """Raises a 422 problem for what is not a cursor of this listing."""
    try:
        step, group, index = map(int, pages.place(after).split(":"))
    except ValueError as e:
        raise pages.bad_cursor(after) from e
    return step, group, index
