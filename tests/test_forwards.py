"""Which forward runs: scales that few can take, and optional packages (CASES 19, 25)."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from op_calls import attention_and_gradients, backward, call, qkv

import dash
from dash import forward as forwards
from dash.forward import ForwardCall, choose_forward, run_forward

# ---- 19: scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-0.25, 0.0, 1e-40, 3])
def test_any_scale_gives_the_derivative(scale, causal) -> None:
    tensors = qkv(seqlen_q=70, seqlen_k=70)
    out, *grads = attention_and_gradients(tensors, causal=causal, softmax_scale=scale)
    q, k, v = (t.double().requires_grad_() for t in tensors)
    mask = torch.ones(70, 70, dtype=torch.bool).tril() if causal else None
    keys, values = (t.repeat_interleave(2, 2).transpose(1, 2) for t in (k, v))
    scores = (q.transpose(1, 2) @ keys.mT) * scale
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    wanted = (scores.softmax(-1) @ values).transpose(1, 2)
    references = torch.autograd.grad(wanted.sum(), (q, k, v))
    for got, want in zip((out, *grads), (wanted, *references), strict=True):
        assert (got.double() - want).norm() <= 0.02 * want.norm() + 1e-12


@pytest.mark.parametrize("scale", [1e39, -3e38, 10**400], ids=["1e39", "-3e38", "10**400"])
def test_a_scale_beyond_float32_is_refused(scale) -> None:
    with pytest.raises(dash.UnsupportedError, match=r"softmax_scale is .*; required: at most 2"):
        dash.attention(*qkv(), softmax_scale=scale)
    if isinstance(scale, float):
        with pytest.raises(dash.UnsupportedError, match=r"softmax_scale is .*; required: at most"):
            backward(call(), softmax_scale=scale)


def on_cuda(*tensors: torch.Tensor, **more: object) -> ForwardCall:
    """A call whose tensors say they are on a GPU, for the choice of a forward."""
    fakes = [_Shaped(t.shape, t.dtype, torch.device("cuda", 0)) for t in tensors]
    return ForwardCall(*fakes, **{"scale": 0.125, **more})


class _Shaped(types.SimpleNamespace):
    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape=shape, dtype=dtype, device=device, stride=lambda dim: 1)


@pytest.fixture
def all_forwards(monkeypatch):
    """Every forward present, as far as PyTorch and the package are asked."""
    package = types.SimpleNamespace(flash_attn_func=lambda *a, **k: None)
    monkeypatch.setattr(forwards, "_find_fa3", lambda: (package, ""))
    monkeypatch.setattr(forwards, "_fa3_lacks", {})
    monkeypatch.setattr(forwards, "_sdpa_params", lambda call, causal: None)
    for name in ("can_use_cudnn_attention", "can_use_flash_attention"):
        monkeypatch.setattr(torch.backends.cuda, name, lambda params: True)
    return package


@pytest.mark.parametrize("scale", [-0.25, 0.0, -0.0, 1e-40])
def test_only_the_plain_forward_takes_a_scale_that_is_not_positive(all_forwards, scale) -> None:
    assert choose_forward(on_cuda(*qkv())) == "fa3"
    assert choose_forward(on_cuda(*qkv(), scale=scale)) == "plain"
    for name in ("fa3", "cudnn", "flash"):
        with pytest.raises(dash.UnsupportedError, match=f"forward is '{name}', and softmax_scale"):
            choose_forward(on_cuda(*qkv(), scale=scale), name)


# ---- 25: optional packages -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('no driver')", "no driver"),
        ("import not_there_at_all", "not_there_at_all"),
        ("raise OSError('undefined symbol')", "undefined symbol"),
        ("", "flash_attn_func"),
    ],
)
def test_a_package_that_does_not_load_is_named_and_left_out(
    monkeypatch, tmp_path, text, said
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    forwards._find_fa3.cache_clear()
    try:
        assert forwards.fa3_package() is None
        assert said in forwards.why_no_fa3()
    finally:
        forwards._find_fa3.cache_clear()
        sys.modules.pop("flash_attn_interface", None)


def test_a_build_without_this_head_dim_is_left_out_after_it_said_so(
    all_forwards, monkeypatch
) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise RuntimeError("This flash attention build does not support headdim 64.")

    all_forwards.flash_attn_func = refuse
    monkeypatch.setitem(forwards._FORWARDS, "cudnn", lambda call: "cudnn ran")
    with pytest.warns(RuntimeWarning, match="does not support headdim 64"):
        assert run_forward(on_cuda(*qkv())) == "cudnn ran"
    assert choose_forward(on_cuda(*qkv())) == "cudnn"
    with pytest.raises(dash.UnsupportedError, match="does not support headdim 64"):
        choose_forward(on_cuda(*qkv()), "fa3")

    def fail(*arguments: object, **more: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    all_forwards.flash_attn_func = fail
    with pytest.raises(torch.OutOfMemoryError):
        run_forward(on_cuda(*qkv(head_dim=128)))


def test_doctor_says_what_a_build_lacks(all_forwards) -> None:
    def only_bfloat16(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: object) -> tuple:
        if q.dtype == torch.float16:
            raise RuntimeError("This flash attention build does not support FP16.")
        return q, q[..., 0]

    all_forwards.flash_attn_func = only_bfloat16
    gaps = forwards.fa3_gaps(torch.device("cpu"))
    assert len(gaps) == 3
    assert all("torch.float16" in gap and "does not support FP16" in gap for gap in gaps)
    half = on_cuda(*qkv(dtype=torch.float16))
    assert choose_forward(half) == "cudnn"
    assert choose_forward(on_cuda(*qkv())) == "fa3"


def test_a_namesake_in_the_same_folder_is_an_error(tmp_path) -> None:
    dash._namesake.check(tmp_path)
    (tmp_path / "dcc").mkdir()
    with pytest.raises(ImportError, match=r"Plotly's dash \(dcc\)"):
        dash._namesake.check(tmp_path)


# ---- What a plan says of the forward -------------------------------------------------------------

SHAPE = (2, 256, 4, 64)


def plan(**more: object) -> dash.Plan:
    return dash.plan(SHAPE, SHAPE, torch.bfloat16, causal=True, **more)


def test_a_plan_names_the_forward() -> None:
    p = plan(device="cpu")
    assert p.forward == "plain"
    assert f"plain: {forwards.KNOWN['plain']}" in str(p)
    assert plan(device="cpu", forward="plain") == p
    assert plan().forward is None  # no device in particular
    assert "forward" not in str(plan())
    assert plan().fingerprint == p.fingerprint
    assert set(forwards.KNOWN) == set(forwards._REFUSALS) == set(forwards._FORWARDS)
    with pytest.raises(dash.UnsupportedError, match="forward is 'flash', and q is on cpu"):
        plan(device="cpu", forward="flash")


def test_the_planned_forward_is_the_one_that_is_taken(all_forwards) -> None:
    assert forwards.planned_forward(plan(device="cpu").problem) == "plain"
    call = on_cuda(*qkv(), causal=True)
    assert choose_forward(call) == "fa3"
    assert choose_forward(call._replace(causal=False), "cudnn") == "cudnn"
    with pytest.raises(dash.UnsupportedError, match="equal lengths"):
        choose_forward(call, "cudnn")
    with pytest.raises(dash.UnsupportedError, match="a window is given"):
        choose_forward(on_cuda(*qkv(), window_left=3), "cudnn")


def test_inputs_with_gaps_in_the_last_dimension() -> None:
    tensors = qkv()
    gaps = [torch.stack((t, t), -1)[..., 0] for t in tensors]
    assert all(t.stride(3) == 2 for t in gaps)
    got, wanted = attention_and_gradients(gaps), attention_and_gradients(tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
