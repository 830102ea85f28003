"""Moving tensors to host memory and back keeps every tensor the object that it is, every view a view, and all bits."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.trainer.megatron.device_memory import DeviceMemory


def every(tensor: torch.Tensor) -> bool:
    return True


@given(st.lists(st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), st.integers(0, 40)),
                max_size=6), st.integers(1, 3))
def test_content_and_views_come_back_and_nothing_is_kept_meanwhile(shapes: list[tuple[torch.dtype, int]], rounds: int
                                                                  ) -> None:
    whole = [torch.arange(n).to(dtype) for dtype, n in shapes]
    views = [t[n // 3:].view(-1) for t, (_, n) in zip(whole, shapes, strict=True)]
    scratch = torch.full((5,), 7.0)
    memory = DeviceMemory(lambda: [*whole, *views], lambda: [scratch], movable=every)
    for number in range(rounds):
        before = [t.clone() for t in whole]
        assert memory.offload() == sum(t.nbytes for t in whole) + scratch.nbytes
        assert memory.offload() == 0, "twice is as once"
        assert not any(t.untyped_storage().nbytes() for t in [*whole, *views, scratch])
        memory.onload()
        memory.onload()
        assert all(torch.equal(a, b) for a, b in zip(whole, before, strict=True)) and not scratch.any()
        for t, view in zip(whole, views, strict=True):
            view.fill_(number)  # still the same memory
            assert torch.equal(t[len(t) - len(view):], view)


def test_state_that_the_optimizer_makes_later_is_moved_too() -> None:
    model = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(model.parameters())
    memory = DeviceMemory(lambda: [*(p.data for p in model.parameters()), *(
        v for state in adam.state.values() for v in state.values())], movable=every)
    few = memory.offload()
    memory.onload()
    model(torch.ones(3)).sum().backward()
    adam.step()
    assert memory.offload() > 2 * few
    memory.onload()
    model(torch.ones(3)).sum().backward()
    adam.step()


def test_moving_changes_no_version_by_which_a_publish_finds_what_has_changed() -> None:
    tensor = torch.ones(4)
    version, memory = tensor._version, DeviceMemory(lambda: [tensor], movable=every)
    memory.offload()
    memory.onload()
    assert tensor._version == version and torch.equal(tensor, torch.ones(4))


def test_tensors_that_are_on_the_host_stay_where_they_are() -> None:
    tensor = torch.ones(4)
    memory = DeviceMemory(lambda: [tensor])
    assert memory.offload() == 0 and tensor.untyped_storage().nbytes() == 16
    memory.onload()
    assert torch.equal(tensor, torch.ones(4))
