"""Whose CUDA context a call works in, and that it leaves the caller's alone (CASES 16, 17, 30)."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from inputs import Shape, gradients, random_inputs, same_bits

import dash

pytestmark = pytest.mark.gpu

SHAPE = Shape(2, 4, 2, 700, 700, 64, causal=True)


class Driver:
    """The driver's functions by name; each call raises for an error."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._library, name)

        def call(*arguments: object) -> None:
            error = function(*arguments)
            assert error == 0, f"{name} failed with error {error}"

        return call

    def current(self) -> int | None:
        context = ctypes.c_void_p()
        self.cuCtxGetCurrent(ctypes.byref(context))
        return context.value


@pytest.fixture(scope="module")
def driver() -> Driver:
    torch.zeros(1, device="cuda")
    return Driver()


def in_new_thread(run: Callable[[], object]) -> object:
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(run()))
    thread.start()
    thread.join()
    assert got, "the thread raised"
    return got[0]


@pytest.mark.parametrize("strategy", ["auto", "ascending"])
def test_the_first_cuda_call_of_a_thread_may_be_ours(driver, strategy) -> None:
    inputs = random_inputs(SHAPE)
    wanted = gradients(inputs, strategy)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def call() -> tuple[object, ...]:
        before = driver.current()
        got = gradients(inputs, strategy)
        return before, got, driver.current()

    def call_on_a_stream() -> tuple[object, ...]:
        with torch.cuda.stream(stream):
            return call()

    for run in (call, call_on_a_stream):
        _, got, _ = in_new_thread(run)
        torch.cuda.synchronize()
        assert same_bits(got, wanted)


def test_a_thread_without_a_context_has_none_afterwards(driver) -> None:
    """The binding alone: PyTorch's own allocations make a context current."""
    from dash import _C

    def call() -> tuple[int | None, int, int | None]:
        return driver.current(), _C.resident_ctas(0, "bfloat16", 64), driver.current()

    before, resident, after = in_new_thread(call)
    assert before is None
    assert after is None
    assert resident > 0


def test_a_process_whose_first_call_is_in_a_thread() -> None:
    program = """
import threading, torch, dash
def run():
    t = torch.randn(1, 256, 2, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dash.attention(t, t, t, causal=True).sum().backward()
    torch.cuda.synchronize()
    print(t.grad.isfinite().all().item())
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""
    command = [sys.executable, "-W", "error:Attempting to run", "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert said.stdout.strip() == "True", said.stderr


def test_a_callers_own_context_stays_current(driver) -> None:
    inputs = random_inputs(SHAPE)
    wanted = gradients(inputs)
    gradients(inputs)  # so that PyTorch has memory for another call, and allocates none below
    torch.cuda.synchronize()
    primary, own = driver.current(), ctypes.c_void_p()
    driver.cuCtxCreate_v2(ctypes.byref(own), 0, 0)  # makes it current
    try:
        assert driver.current() == own.value != primary
        got = gradients(inputs)
        assert driver.current() == own.value
    finally:
        driver.cuCtxSetCurrent(ctypes.c_void_p(primary))
        torch.cuda.synchronize()
        driver.cuCtxDestroy_v2(own)
    assert same_bits(got, wanted)


# ---- Green contexts ------------------------------------------------------------------------------

_RESOURCE_BYTES = 144  # sizeof(CUdevResource), with room
_SM_RESOURCE = 1
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM
_NON_BLOCKING = 1


@contextmanager
def green_stream(driver: Driver, sms: int) -> Iterator[tuple[torch.cuda.ExternalStream, int]]:
    """A stream of a green context of at least ``sms`` SMs, and how many it has."""
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    whole, part, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
    driver.cuDeviceGetDevResource(device, whole, _SM_RESOURCE)
    groups = ctypes.c_uint(1)
    driver.cuDevSmResourceSplitByCount(
        part, ctypes.byref(groups), whole, rest, 0, ctypes.c_uint(sms)
    )
    description, green, stream = (ctypes.c_void_p() for _ in range(3))
    driver.cuDevResourceGenerateDesc(ctypes.byref(description), part, 1)
    driver.cuGreenCtxCreate(ctypes.byref(green), description, device, _DEFAULT_STREAM)
    driver.cuGreenCtxStreamCreate(ctypes.byref(stream), green, _NON_BLOCKING, 0)
    # CUdevResource: type (4 bytes), 92 of padding, then the union, which begins with smCount.
    count = int.from_bytes(part.raw[96:100], "little")
    try:
        yield torch.cuda.ExternalStream(stream.value), count
    finally:
        torch.cuda.synchronize()
        driver.cuStreamDestroy_v2(stream)
        driver.cuGreenCtxDestroy(green)


def test_a_green_context_counts_its_own_sms(driver) -> None:
    full = Shape(1, 2, 2, 8192, 8192, 64)
    inputs = random_inputs(full)
    acyclic, cyclic = gradients(inputs, "staggered"), gradients(inputs, "shift")
    torch.cuda.synchronize()
    before = driver.current()
    with green_stream(driver, 16) as (stream, sms), torch.cuda.stream(stream):
        assert 16 <= sms < 64
        assert same_bits(gradients(inputs, "staggered"), acyclic)
        with pytest.raises(dash.UnsupportedError, match=rf"strategy 'shift' needs .*got {sms}\b"):
            gradients(inputs, "shift")
    assert driver.current() == before
    assert same_bits(gradients(inputs, "shift"), cyclic)


# ---- 17: the determinism switch ------------------------------------------------------------------


def test_the_determinism_switch_changes_neither_bits_nor_time() -> None:
    shape = Shape(32, 16, 16, 512, 512, 128, causal=True)
    inputs = random_inputs(shape)
    wanted = gradients(inputs)

    def milliseconds() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(100):
            gradients(inputs)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    times: dict[bool, list[float]] = {False: [], True: []}
    try:
        for switch in (False, True) * 5:
            torch.use_deterministic_algorithms(switch)
            assert same_bits(gradients(inputs), wanted)
            times[switch].append(milliseconds())
    finally:
        torch.use_deterministic_algorithms(False)
    off, on = (sorted(times[switch])[2] for switch in (False, True))
    assert on < 1.05 * off  # the fill is 24%; benchmarks/host_time.py measures the rest
