"""The same bits, and no hang, while a second stream holds a varying number of SMs.

CTAs of the main kernel start late, on few SMs, in an order of their own: what a busy machine, MPS
or another GPU model does to a schedule.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable

import pytest
import torch
from device_programs import compile_cuda
from gpu_conditions import DifferentCalls
from hang_guard import hang_guard, terminal  # noqa: F401  fixtures
from inputs import Shape, gradients, needs_gpu, random_inputs, skip_if_refused, with_strategies
from pack_cases import LENGTHS, pack_on_device, strategies_of
from packs import PackShape

pytestmark = [pytest.mark.gpu, needs_gpu]

HoldSms = Callable[[int, int], None]  # how many SMs, for how many microseconds

SHAPES = [
    Shape(2, 6, 2, seqlen, seqlen, head_dim, causal)
    for seqlen, head_dim, causal in itertools.product((640, 2048), (64, 128), (False, True))
]


@pytest.fixture(scope="module")
def hold_sms(tmp_path_factory: pytest.TempPathFactory) -> HoldSms:
    """Enqueues a kernel that holds SMs on a second stream."""
    library = tmp_path_factory.mktemp("hold_sms") / "hold_sms.so"
    flags = ("-shared", "-Xcompiler", "-fPIC")
    enqueue = ctypes.CDLL(str(compile_cuda("hold_sms.cu", library, *flags))).hold_sms
    enqueue.argtypes = (ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p)
    torch.zeros(1, device="cuda")  # makes torch's context the current one
    stream = torch.cuda.Stream()

    def hold(sms: int, microseconds: int) -> None:
        error = enqueue(sms, 1000 * microseconds, stream.cuda_stream)
        assert error == 0, f"hold_sms: CUDA error {error}"

    return hold


def sm_count() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(SHAPES))
def test_bits_do_not_depend_on_how_many_sms_are_free(
    shape: Shape, strategy: str, hold_sms: HoldSms
) -> None:
    """20, 78 and 114 SMs, as parts of the family have, one, and all of them."""
    skip_if_refused(shape, strategy)
    inputs = random_inputs(shape)
    different = DifferentCalls(gradients(inputs, strategy))
    for free in (20, 78, 114, 1, sm_count()):
        held = max(0, sm_count() - free)
        torch.cuda.synchronize()
        if held:
            hold_sms(held, 3000)
            torch.cuda._sleep(200_000)  # about 100 µs: the holders are there first
        different.add(gradients(inputs, strategy))
    assert different.count() == 0


def play_beside_holders(shape: Shape, strategy: str, calls: int, hold_sms: HoldSms) -> None:
    skip_if_refused(shape, strategy)
    chance = random.Random(shape.seqlen_q)
    inputs = random_inputs(shape)
    different = DifferentCalls(gradients(inputs, strategy))
    for _ in range(calls):
        hold_sms(chance.randrange(1, sm_count()), chance.randrange(5, 150))
        different.add(gradients(inputs, strategy))
    assert different.count() == 0


@pytest.mark.parametrize(("shape", "strategy"), with_strategies(SHAPES))
def test_calls_beside_holders_of_sms(shape: Shape, strategy: str, hold_sms: HoldSms) -> None:
    play_beside_holders(shape, strategy, 200, hold_sms)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy"), with_strategies(SHAPES[:4]))
def test_no_hang_in_ten_thousand_calls(shape: Shape, strategy: str, hold_sms: HoldSms) -> None:
    play_beside_holders(shape, strategy, 10_000, hold_sms)


# ---- Packed sequences ----------------------------------------------------------------------------

PACKS = [
    PackShape(LENGTHS[name], 6, 2, head_dim, causal)
    for name, head_dim, causal in (
        ("ragged", 64, True), ("ragged", 128, False), ("unequal", 128, True),
        ("one long", 128, True), ("one long", 64, False), ("many short", 128, True),
    )
]  # fmt: skip
# Cyclic and acyclic sequences in one pack: auto gives the first kind circles of tickets.
PACKS += [
    PackShape(((2048, 2048), (100, 900), (1024, 1024), (4096, 4096)), 2, 2, 128, True),
    PackShape(((2048, 2048), (3000, 500), (512, 512)), 4, 4, 64, False),
]


@pytest.mark.parametrize("shape", PACKS, ids=str)
def test_bits_of_packs_whatever_sms_are_free(shape: PackShape, hold_sms: HoldSms) -> None:
    """20, 78 and 114 SMs, as parts of the family have, one, and all of them."""
    pack = pack_on_device(shape)
    for strategy in strategies_of(shape):
        different = DifferentCalls(pack.gradients(strategy))
        for free in (20, 78, 114, 1, sm_count()):
            held = max(0, sm_count() - free)
            torch.cuda.synchronize()
            if held:
                hold_sms(held, 2000)
                torch.cuda._sleep(200_000)  # about 100 µs: the holders are there first
            different.add(pack.gradients(strategy))
        assert different.count() == 0, strategy


@pytest.mark.parametrize("shape", PACKS, ids=str)
def test_packed_calls_beside_holders_of_sms(shape: PackShape, hold_sms: HoldSms) -> None:
    chance = random.Random(shape.total(0))
    pack = pack_on_device(shape)
    different = DifferentCalls(pack.gradients())
    for _ in range(100):
        hold_sms(chance.randrange(1, sm_count()), chance.randrange(5, 150))
        different.add(pack.gradients())
    assert different.count() == 0
