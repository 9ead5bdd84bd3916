"""Providers beside dash: what they are asked for, and what is said of absent ones."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from dash.bench import fa3_jax, worker
from dash.bench.flash_interface import FA3_MODULE, FA4_MODULE, find_module, interface_calls
from dash.bench.inputs import make_tensors, plain_sequence
from dash.bench.measure import Meter
from dash.bench.providers import CallProvider, Unavailable, check, dash_calls
from dash.bench.run import ALL_PROVIDERS, Bench, find_provider, find_providers
from dash.bench.shapes import Shape, packed_shape

STAND_INS = Path(__file__).parent / "stand_ins"

DENSE = Shape(2, 48, 4, 2, 16)
CAUSAL = Shape(2, 40, 4, 2, 16, True, seqlen_k=56)
WINDOW = Shape(1, 64, 2, 2, 16, True, window_left=7)
TWO_SIDED = Shape(1, 64, 2, 1, 16, window_left=5, window_right=9)
WIDE_V = Shape(1, 32, 2, 2, 24, True, head_dim_v=16)
PACKED = packed_shape((17, 1, 40), 4, 2, 16, True)
SHAPES = [DENSE, CAUSAL, WINDOW, TWO_SIDED, WIDE_V, PACKED]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """FlashAttention-3's package, here and in the processes that are started."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    root = str(Path(__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", f"{STAND_INS}:{root}")
    monkeypatch.delitem(sys.modules, FA3_MODULE, raising=False)
    module = importlib.import_module(FA3_MODULE)
    module.CALLS.clear()
    yield module
    sys.modules.pop(FA3_MODULE, None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attention_3_by_its_interface(stand_in, shape: Shape, deterministic: bool) -> None:
    tensors = make_tensors(shape, "cpu")
    call, facts = interface_calls(FA3_MODULE, deterministic)(shape, tensors)
    check(call, tensors)
    assert facts == {"version": "flash_attn_interface 3.0.0-stand-in"}
    (asked,) = stand_in.CALLS
    assert asked["deterministic"] is deterministic
    wanted = {WINDOW: (7, 0), TWO_SIDED: (5, 9)}.get(shape, (-1, -1))
    assert asked["window_size"] == wanted
    assert asked["causal"] is shape.causal


@pytest.mark.parametrize("shape", [DENSE, CAUSAL, PACKED], ids=str)
def test_dash_is_called_with_what_it_takes(shape: Shape) -> None:
    tensors = make_tensors(shape, "cpu")
    call, facts = dash_calls("auto")(shape, tensors)
    check(call, tensors)
    assert facts["version"]


@pytest.fixture
def stand_in_4(monkeypatch: pytest.MonkeyPatch):
    """FlashAttention-4's package: None is an unlimited window, lse comes too, no longest length."""
    calls = []

    def dense(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0,
              deterministic=False):  # fmt: skip
        calls.append(window_size)
        batches = zip(q, k, v, strict=True)
        return torch.stack(
            [sequence(*t, softmax_scale, causal, window_size) for t in batches]
        ), None

    def varlen(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, softmax_scale=None, causal=False,
               window_size=(None, None)):  # fmt: skip
        ends = cu_seqlens_q.tolist()
        rows = [slice(*ends[i : i + 2]) for i in range(len(ends) - 1)]
        return torch.cat(
            [sequence(q[r], k[r], v[r], softmax_scale, causal, window_size) for r in rows]
        ), None

    def sequence(q, k, v, scale, causal, window):
        assert scale == q.shape[-1] ** -0.5
        left, right = window
        shape = Shape(1, len(q), q.shape[1], k.shape[1], q.shape[2], causal, seqlen_k=len(k),
                      head_dim_v=v.shape[2], window_left=left, window_right=right)  # fmt: skip
        return plain_sequence(shape, q.float(), k.float(), v.float())[0].to(q.dtype)

    module = type(sys)(FA4_MODULE)
    module.flash_attn_func, module.flash_attn_varlen_func, module.calls = dense, varlen, calls
    monkeypatch.setitem(sys.modules, "flash_attn", type(sys)("flash_attn"))
    monkeypatch.setitem(sys.modules, FA4_MODULE, module)
    return module


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flash_attention_4_by_its_interface(stand_in_4, shape: Shape) -> None:
    tensors = make_tensors(shape, "cpu")
    call, _ = interface_calls(FA4_MODULE, False)(shape, tensors)
    check(call, tensors)
    if not shape.packed:
        wanted = {WINDOW: (7, 0), TWO_SIDED: (5, 9)}.get(shape, (None, None))
        assert stand_in_4.calls == [wanted]


def test_a_release_without_determinism_has_no_deterministic_number(stand_in_4) -> None:
    tensors = make_tensors(PACKED, "cpu")
    with pytest.raises(Unavailable, match="does not take deterministic"):
        interface_calls(FA4_MODULE, True)(PACKED, tensors)


def test_a_wrong_provider_gets_no_number() -> None:
    tensors = make_tensors(DENSE, "cpu")
    dq, dk, dv = tensors.gradients
    provider = CallProvider("x", True, lambda *_: ((lambda: (dq, dk, dv * 1.5)), {}), Meter())
    with pytest.raises(Unavailable, match=r"WRONG: dv differs from the reference by 0\.(4|5)"):
        provider.prepare(DENSE, tensors)


def test_dash_as_flash_attention_3_is_not_measured_as_it(monkeypatch) -> None:
    import dash

    fake = type(sys)("flash_attn_interface")
    fake.__file__ = str(Path(dash.__file__).parent / "compat" / "flash_attn_interface.py")
    monkeypatch.setitem(sys.modules, FA3_MODULE, fake)
    with pytest.raises(Unavailable, match="dash's own adapter"):
        find_module(FA3_MODULE)


def test_the_worker_measures_the_stand_in(stand_in) -> None:
    provider = find_provider("fa3_det", Meter())
    try:
        prepared = provider.prepare(PACKED, None)
        assert prepared.version == "flash_attn_interface 3.0.0-stand-in"
        assert prepared.window(0.01).ms > 0
        with pytest.raises(Unavailable, match="RuntimeError"):  # no such head: heads % kv_heads
            provider.prepare(Shape(1, 8, 3, 2, 16), None)
        assert provider.prepare(WINDOW, None).window(0.01).ms > 0
    finally:
        provider.close()


WORKER = """
import json, sys, time
for line in sys.stdin:
    request = json.loads(line)
    print("noise of a library", flush=True)
    if request.get("shape", {}).get("seqlen") == 64:
        time.sleep(60)
    window = {"ms": 1.5, "sm_clock": None, "joules": 2.0}
    print(json.dumps({"version": "1"} if "shape" in request else window), flush=True)
"""


def test_a_hang_costs_one_problem_and_two_cost_the_provider(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(worker, "START_SECONDS", 20)
    monkeypatch.setattr(worker, "ANSWER_SECONDS", 1)
    monkeypatch.setattr(worker.WorkerProvider, "why_absent", lambda self, shape: None)
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    provider = worker.WorkerProvider("fa3_det")
    provider._command = [sys.executable, str(script)]
    try:
        assert provider.prepare(DENSE, None).window(0.1).ms == 1.5
        with pytest.raises(Unavailable, match="no answer"):
            provider.prepare(WINDOW, None)
        again = provider.prepare(PACKED, None)
        assert again.window(0.1).joules == 2.0
        with pytest.raises(Unavailable, match="no answer"):
            provider.prepare(TWO_SIDED, None)
        monkeypatch.undo()
        assert "given up after 2" in provider.why_absent(DENSE)
        with pytest.raises(Unavailable, match="given up"):
            again.window(0.1)
    finally:
        provider.close()


def test_why_flash_attention_3_is_absent(monkeypatch) -> None:
    found = set()
    monkeypatch.setattr(worker.importlib.util, "find_spec", lambda name: name in found or None)
    provider = find_provider("fa3_nondet", Meter())
    assert "no module flash_attn_interface; flash-attn3-jax: no module jax" in (
        provider.why_absent(DENSE)
    )
    found |= set(fa3_jax.NEEDS)
    assert provider.why_absent(DENSE) == "the wheel holds head dimension 128 only"
    assert provider.why_absent(Shape(1, 64, 1, 1, 128)) is None
    found.add(FA3_MODULE)
    assert provider.why_absent(DENSE) is None


def test_provider_names() -> None:
    meter = Meter()
    for name in (*ALL_PROVIDERS, "fa2_nondet", "dash:spt"):
        assert find_provider(name, meter).name == name
        assert find_provider(name, meter).deterministic is not name.endswith("nondet")
    assert len(find_providers(["dash:all"], meter)) >= 8
    for name in ("cudnn_det", "fa5_det", "fa3", "dsah"):
        with pytest.raises(ValueError, match="no provider"):
            find_provider(name, meter)


def test_a_run_on_the_cpu(stand_in) -> None:
    """dash and the stand-in side by side; what cannot run has its reason."""
    bench = Bench(["dash", "fa3_nondet", "cudnn_nondet"], 0.01, 3)
    shape = Shape(1, 64, 2, 1, 64, True)
    rounds = []
    try:
        rows = list(bench.measure(shape, lambda: rounds.append(1)))
    finally:
        bench.close()
    assert [row["provider"] for row in rows] == ["dash", "fa3_nondet"]
    assert len(rounds) == 3
    assert all(row["rounds"] == 3 and row["ms"] > 0 for row in rows)
    assert rows[0]["fingerprint"]
    assert rows[0]["strategy"]
    (line,) = bench.absent.lines(1)
    assert line.startswith("cudnn_nondet: ")


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (Shape(2, 512, 16, 16, 128), (2, 16, 640)),
        (Shape(2, 1280, 16, 16, 128, True), (2, 16, 1280)),
        (packed_shape((513, 512), 16, 8, 128, False), (16, 1920)),
    ],
)
def test_workspace_of_the_wheel_holds_whole_tiles(shape: Shape, rows: tuple[int, ...]) -> None:
    assert fa3_jax.workspace_shape(shape) == rows
    for tile in (64, 80, 128):
        needed = sum(shape.lengths) + shape.batch * tile if shape.packed else shape.seqlen
        assert rows[-1] >= -(-needed // tile) * tile


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(2, 512, 16, 8, 128, True),
        Shape(2, 512, 16, 8, 128, True, window_left=127),
        packed_shape((300, 212), 16, 8, 128, False),
    ],
    ids=str,
)
def test_the_wheels_ffi_call_lowers(shape: Shape, dtype: str) -> None:
    """Without a GPU: the program that XLA would get names the target, operands and attributes."""
    jax = pytest.importorskip("jax")
    import functools

    import jax.numpy as jnp

    def array(size: tuple[int, ...], kind: object = getattr(jnp, dtype)) -> object:
        return jax.ShapeDtypeStruct(size, kind)

    lse = (shape.heads, *shape.rows) if shape.packed else (shape.batch, shape.heads, shape.seqlen)
    arrays = [array(s) for s in (shape.out_shape, shape.q_shape, shape.k_shape, shape.v_shape)]
    arrays += [array(shape.out_shape), array(lse, jnp.float32)]
    arrays += [array((shape.batch + 1,), jnp.int32)] if shape.packed else []
    call = functools.partial(fa3_jax.backward, shape=shape, deterministic=True)
    lowered = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in lowered.splitlines() if f"@{fa3_jax.TARGET}(" in line)
    for attribute in (
        "deterministic = true",
        f"is_causal = {str(shape.causal).lower()}",
        f"max_seqlen_q_val = {shape.seqlen} : i64",
        f"window_size_left = {-1 if shape.window_left is None else shape.window_left} : i64",
        f"window_size_right = {0 if shape.windowed else -1} : i64",
    ):
        assert attribute in line
    operands = line.partition(" : (")[2].partition(") -> ")[0]
    assert operands.count("tensor<0xi32>") == (2 if shape.packed else 4)
    assert operands.count(f"tensor<{shape.batch + 1}xi32>") == (2 if shape.packed else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa2_det", "fa2_nondet", "cudnn_nondet", "fa3_nondet"])
def test_each_provider_is_right_on_the_device(name: str) -> None:
    """Or says why it is absent; a wrong gradient is never a reason."""
    provider = find_provider(name, Meter())
    reasons = []
    shapes = [Shape(2, 640, 8, 4, 128, True), packed_shape((300, 17, 900), 8, 4, 128, False)]
    shapes += [Shape(1, 1024, 8, 8, 128, True, window_left=127)]
    try:
        for shape in shapes:
            try:
                assert provider.prepare(shape, make_tensors(shape)).window(0.02).ms > 0
            except Unavailable as reason:
                reasons.append(str(reason))
    finally:
        provider.close()
        torch.cuda.empty_cache()
    assert not [reason for reason in reasons if "WRONG" in reason]
