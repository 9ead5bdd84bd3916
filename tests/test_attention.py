"""dash.attention: its forward passes, and its gradients against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_calls import BFLOAT16, assert_same_bits, call

import dash
from dash.forward import ForwardCall, cudnn_forward, plain_forward


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float):
    """out in fp64, differentiable; bottom-right causal."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    mask = mask.tril(k.shape[2] - q.shape[2]) if causal else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_and_its_gradients_match_pytorch(dtype, kv_heads, scale, causal) -> None:
    tensors = call(kv_heads=kv_heads, dtype=dtype)
    q, k, v = (tensors[name].requires_grad_() for name in "qkv")
    out = dash.attention(q, k, v, causal=causal, softmax_scale=scale)
    wanted = exact(q, k, v, causal, 64**-0.5 if scale is None else scale)
    tolerance = 8e-3 if dtype == BFLOAT16 else 1e-3  # two roundings to the dtype
    assert relative_error(out, wanted) < tolerance
    grads = torch.autograd.grad(out, (q, k, v), tensors["dout"])
    references = torch.autograd.grad(wanted, (q, k, v), tensors["dout"].double())
    for grad, reference in zip(grads, references, strict=True):
        assert relative_error(grad, reference) < tolerance


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(600, 600), (700, 520), (3, 530)])
def test_plain_forward(seqlen_q, seqlen_k, causal) -> None:
    """More query rows than one block; rows without keys give zeros and lse = -inf."""
    q, k, v = (call(1, seqlen_q, seqlen_k)[name] for name in "qkv")
    out, lse = plain_forward(q.double(), k.double(), v.double(), 0.2, causal)
    hidden = max(0, seqlen_q - seqlen_k) if causal else 0
    torch.testing.assert_close(out[:, hidden:], exact(q, k, v, causal, 0.2)[:, hidden:])
    assert not out[:, :hidden].any()
    assert (lse[..., :hidden] == -torch.inf).all()
    keys = k.double().repeat_interleave(2, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * 0.2
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    mask = mask.tril(seqlen_k - seqlen_q) if causal else mask
    torch.testing.assert_close(lse, scores.masked_fill(~mask, -torch.inf).logsumexp(-1))


def test_cudnn_is_never_used_for_a_mask_it_aligns_otherwise() -> None:
    q, k, v = (call()[name] for name in "qkv")
    with pytest.raises(ValueError, match="top-left"):
        cudnn_forward(ForwardCall(q, k, v, 0.125, True))


def test_return_lse() -> None:
    q, k, v = (call()[name].requires_grad_() for name in "qkv")
    out, lse = dash.attention(q, k, v, return_lse=True)
    assert lse.shape == (2, 4, 96)
    assert lse.dtype == torch.float32
    assert out.requires_grad
    assert lse.requires_grad


def test_attention_checks_before_the_forward() -> None:
    q, k, v = (call()[name] for name in "qkv")
    with pytest.raises(dash.UnsupportedError, match="strategy is 'fastest'"):
        dash.attention(q, k, v, strategy="fastest")
    with pytest.raises(dash.UnsupportedError, match="v has dtype"):
        dash.attention(q, k, v.float())


def test_second_derivative_is_a_clear_error() -> None:
    q, k, v = (call()[name].requires_grad_() for name in "qkv")
    dq = torch.autograd.grad(dash.attention(q, k, v).sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="no derivative"):
        dq.sum().backward()


def test_gradient_of_one_input_only() -> None:
    q, k, v = (call()[name] for name in "qkv")
    dash.attention(q, k.requires_grad_(), v).sum().backward()
    assert k.grad is not None
    assert q.grad is None


def test_torch_compile_keeps_one_graph_and_the_bits() -> None:
    q, k, v = (call()[name].requires_grad_() for name in "qkv")

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dash.attention(q * 2, k, v, causal=True).float().square().sum()

    eager = torch.autograd.grad(loss(q, k, v), (q, k, v))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_same_bits(torch.autograd.grad(compiled(q, k, v), (q, k, v)), eager)
