"""The benches beside products of others: the rows of ``elastic-rl bench`` with alternatives, and rows that are nothing
but a comparison. They run from a checkout, as ``python -m benchmarks NAME``, and are no part of the package."""

from __future__ import annotations

from functools import partial

from elastic_rl.bench import Benches, control, dcs, loop

CONTROL = control.SUITE.extended("benchmarks.control", {"heartbeat": control.SUITE.rows["heartbeat"]})
DCS = dcs.SUITE.extended("benchmarks.dcs", {
    "pull_latency": dcs.SUITE.rows["pull_latency"],
    "apply_latency": ("P1-apply-1", "P1-apply-2", *dcs.SUITE.rows["apply_latency"])})
LOOP = loop.SUITE.extended("benchmarks.loop", {
    "vs_trl": ("vs-trl-small", "vs-trl-small-s", "vs-trl-small-tokens"),
    "vs_trl_long": ("vs-trl-long", "vs-trl-long-s", "vs-trl-long-tokens"),
    "sft_vs_transformers": ("sft-vs-transformers", "sft-tokens-per-s")})
BENCHES = Benches("python -m benchmarks", {
    "control": partial(control.run, suite=CONTROL), "dcs": partial(dcs.run, suite=DCS),
    "loop": partial(loop.run, suite=LOOP)})
