"""Copies from the device to the host: through two buffers that are used in turn."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from elastic_rl.trainer.checkpoint.host_copy import HostCopier, Named

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def tensors(device: torch.device) -> list[Named]:
    """Tensors of all sizes, among them an empty and a scalar one; random states come from the CPU in between."""
    generator = torch.Generator().manual_seed(1)
    out: list[Named] = []
    for i, shape in enumerate([(3, 5), (), (1000, 70), (0, 4), (2,), (1000, 71), (7,)] * 3):
        data = torch.randint(0, 100, shape, generator=generator).to(DTYPES[i % len(DTYPES)])
        out.append((2 * i, f"device.{i}", data.to(device)))
        if i % 3 == 0:
            out.append((2 * i + 1, f"rng.{i}", torch.get_rng_state()))
    return out


def test_every_tensor_arrives_in_order_and_from_either_memory(device: torch.device) -> None:
    copier, sent = HostCopier(device, staged=True), tensors(device)
    for _ in range(2):  # buffers are reused over calls
        arrived = [(order, name, host.clone(), host.device.type) for order, name, host in copier(sent)]
        assert [(order, name) for order, name, *_ in arrived] == [(order, name) for order, name, _ in sent]
        assert all(kind == "cpu" for *_, kind in arrived)
        for (_, _, host, _), (_, _, source) in zip(arrived, sent, strict=True):
            assert host.dtype == source.dtype and torch.equal(host, source.cpu())


def test_sources_may_change_once_the_copies_are_exhausted(device: torch.device) -> None:
    parameter = torch.full((1 << 20,), 1.0, device=device)
    kept = [host.clone() for _, _, host in HostCopier(device, staged=True)([(0, "p", parameter)])]
    parameter.fill_(2.0)
    assert bool((kept[0] == 1.0).all())


def test_memory_of_a_temporary_is_not_reused_while_it_is_copied(device: torch.device) -> None:
    """Each is dropped as soon as it is handed over, and the next one would get its memory at once."""
    count, elements = 30, 1 << 20

    def temporaries() -> Iterator[Named]:
        for i in range(count):
            yield i, str(i), torch.full((elements,), float(i), device=device)

    for order, _, host in HostCopier(device, staged=True)(temporaries()):
        assert bool((host == order).all()), f"tensor {order} was overwritten"


def test_without_a_device_tensors_are_passed_on_as_they_are() -> None:
    sent = tensors(torch.device("cpu"))
    assert all(host is source for (_, _, host), (_, _, source) in zip(HostCopier(torch.device("cpu"))(sent), sent,
                                                                       strict=True))
