"""The tensor-parallel size of an engine, as SGLang's own parser reads it from the arguments."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.config import EngineConfig
from elastic_rl.driver import placement
from elastic_rl.engine.server.arguments import tensor_parallel
from elastic_rl.errors import ConfigError

NAMES = ["--tp", "--tp-size", "--tensor-parallel-size", "--tensor-parallel"]
OTHERS = [["--enable-metrics"], ["--mem-fraction-static", "0.8"], ["--tool-call-parser=qwen"], ["--port", "2"]]


def option(name: str, size: int, one_word: bool) -> list[str]:
    return [f"{name}={size}"] if one_word else [name, str(size)]


sizes = st.builds(option, st.sampled_from(NAMES), st.integers(1, 16), st.booleans())


def expected(args: list[str]) -> int:
    """What argparse makes of it, with the names that SGLang gives the option."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1, dest="size")
    parser.add_argument("--tool-call-parser")
    return int(parser.parse_known_args(args)[0].size)


@given(st.lists(st.one_of(sizes, st.sampled_from(OTHERS)), max_size=6))
def test_size_is_read_as_sglang_reads_it(options):
    args = [word for words in options for word in words]
    assert tensor_parallel(args) == expected(args)


@pytest.mark.parametrize("args", [["--tp"], ["--tp", "two"], ["--tp-size=0"], ["--tp="], ["--tp", "-1"]])
def test_size_that_is_no_number_is_refused(args):
    with pytest.raises(ConfigError, match="tensor-parallel"):
        tensor_parallel(args)


@pytest.mark.parametrize(("args", "gpus"), [([], 1), (["--tp=2"], 2), (["--tensor-parallel-size", "8"], 8)])
def test_engine_reserves_a_gpu_for_each_rank(args, gpus, monkeypatch):
    from elastic_rl import config
    cfg = config.parse({"device": {"type": "cuda"}, "engine": EngineConfig(extra_args=args).model_dump()})
    assert placement.gpus_per_engine(cfg.device, cfg.engine) == gpus
    on_cpu = config.parse({"device": {"type": "cpu"}, "engine": EngineConfig(extra_args=args).model_dump()})
    assert placement.gpus_per_engine(on_cpu.device, on_cpu.engine) == 0
