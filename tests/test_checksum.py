"""``dash.checksum``: every bit and every position counts, layouts and shards do not."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dash import checksum

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.bool, torch.complex64)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_give_equal_checksums_and_strides_do_not_count(dtype) -> None:
    t = drawn(6, 5, 4, dtype=dtype)
    assert checksum(t) == checksum(t.clone())
    assert checksum(t) == checksum(t.transpose(0, 2).contiguous().transpose(0, 2))
    assert checksum(t) != checksum(t.transpose(0, 2))


def test_every_bit_of_every_element_changes_it() -> None:
    t = drawn(3, 4)
    seen = {str(checksum(t))}
    for index in range(t.numel()):
        for bit in range(16):
            changed = t.clone()
            mask = -(2**15) if bit == 15 else 1 << bit
            changed.view(torch.int16).view(-1)[index] ^= mask
            seen.add(str(checksum(changed)))
    assert len(seen) == 1 + 16 * t.numel()


def test_equal_changes_in_two_places_do_not_cancel() -> None:
    t = drawn(64)
    changed = t.clone()
    changed.view(torch.int16)[[3, 40]] ^= 1  # an XOR of all elements would not see it
    assert checksum(changed) != checksum(t)


def test_exchanged_elements_and_tensors_and_names_change_it() -> None:
    a, b = drawn(8, seed=1), drawn(8, seed=2)
    assert checksum(torch.cat([a, b])) != checksum(torch.cat([b, a]))
    assert checksum([a, b]) != checksum([b, a])
    assert checksum({"a": a, "b": b}) == checksum({"b": b, "a": a})
    assert checksum({"a": a, "b": b}) != checksum({"a": b, "b": a})
    assert checksum(a) != checksum(a.view(2, 4))
    assert checksum(torch.zeros(2)) != checksum(torch.zeros(2, dtype=torch.int32))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_chunks_do_not_show(monkeypatch) -> None:
    t = drawn(7, 3, 5)
    whole = str(checksum(t))
    for size in (1, 4, 16, 40):
        monkeypatch.setitem(checksum.__globals__, "_CHUNK", size)
        assert str(checksum(t)) == whole


def test_empty_and_scalar_tensors() -> None:
    assert int(checksum([])) == 0
    assert int(checksum(torch.empty(0, 3))) == 0
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))


def test_its_words_are_those_of_splitmix64() -> None:
    """By Python's integers, so that the device's signed arithmetic is checked."""
    module = checksum.__globals__
    t = torch.tensor([5, -3, 2**40], dtype=torch.int64)
    key = module["_key"]("0", t)
    total = 0
    for position, bits in enumerate(t.tolist()):
        z = (bits * module["_BITS"] + position * module["_POSITION"] + key) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        total += z ^ (z >> 31)
    assert int(checksum(t)) == total % 2**64


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match=r"required: torch\.strided"):
        checksum(torch.eye(3).to_sparse())


@pytest.mark.parametrize("placements", [[Shard(0), Replicate()], [Shard(1), Shard(0)]], ids=str)
def test_the_ranks_of_a_sharded_tensor_add_up_to_the_whole(placements) -> None:
    t = drawn(7, 6, dtype=torch.float32)
    total = 0
    for rank in range(4):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            shards = distribute_tensor(t, mesh, placements, src_data_rank=None)
            total += int(checksum({"w": shards}))
        finally:
            torch.distributed.destroy_process_group()
    assert total % 2**64 == int(checksum({"w": t}))


@pytest.mark.gpu
def test_the_gpu_and_the_cpu_agree_and_nothing_waits() -> None:
    t = drawn(1000, 33)
    on_gpu = t.cuda()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        later = checksum({"w": on_gpu})
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert later == checksum({"w": t})
