"""What the gradients should be: an fp64 reference, plain PyTorch in the same dtype, and the rule.

Both work on chunks of (batch, KV head) pairs, so that scores of any problem fit the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from inputs import DEVICE, Gradients, Inputs, Shape

CHUNK_SCORES = 2**27  # elements of one chunk's score matrices: 1 GiB each in fp64


def by_kv_head(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(batch, seqlen, heads, head_dim) → (batch · kv_heads, group, seqlen, head_dim)."""
    batch, seqlen, heads, head_dim = tensor.shape
    grouped = tensor.reshape(batch, seqlen, kv_heads, heads // kv_heads, head_dim)
    return grouped.permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, -1, seqlen, head_dim)


def from_kv_head(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """The inverse of ``by_kv_head``."""
    pairs, group, seqlen, head_dim = tensor.shape
    split = tensor.reshape(batch, pairs // batch, group, seqlen, head_dim)
    return split.permute(0, 3, 1, 2, 4).reshape(batch, seqlen, -1, head_dim)


def visible(seqlen_q: int, seqlen_k: int, causal: bool) -> torch.Tensor:
    """(seqlen_q, seqlen_k) bool: bottom-right aligned causal, or all true."""
    rows = torch.arange(seqlen_q, device=DEVICE)[:, None]
    columns = torch.arange(seqlen_k, device=DEVICE)[None, :]
    if not causal:
        return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=DEVICE)
    return columns <= rows + (seqlen_k - seqlen_q)


def chunks(pairs: int, scores_a_pair: int) -> Iterator[slice]:
    size = max(1, CHUNK_SCORES // scores_a_pair)
    for first in range(0, pairs, size):
        yield slice(first, first + size)


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    """out, lse, dq, dk, dv in fp64. Rows without keys: out 0, lse -inf, no gradient."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, kv_heads = k.shape[1:3]
    hidden = ~visible(seqlen_q, seqlen_k, causal)
    q, k, v, dout = (by_kv_head(t, kv_heads) for t in (q, k, v, dout))
    parts = []
    for some in chunks(q.shape[0], q.shape[1] * seqlen_q * seqlen_k):
        q64, k64, v64, do64 = (t[some].double() for t in (q, k, v, dout))
        scores = (q64 @ k64.mT).mul_(scale).masked_fill_(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        p = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()
        out = p @ v64
        dv = (p.mT @ do64).sum(1, keepdim=True)
        ds = (do64 @ v64.mT).sub_((do64 * out).sum(-1, keepdim=True)).mul_(p)
        dq = (ds @ k64) * scale
        dk = (ds.mT @ q64).sum(1, keepdim=True) * scale
        parts.append((out, lse, dq, dk, dv))
    out, lse, dq, dk, dv = (torch.cat(part) for part in zip(*parts, strict=True))
    lse = lse.reshape(batch, heads, seqlen_q)
    return from_kv_head(out, batch), lse, *(from_kv_head(t, batch) for t in (dq, dk, dv))


def plain_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    scale: float,
    causal: bool,
) -> Gradients:
    """dq, dk, dv by autograd of softmax(q k^T) v in the dtype of q: ``pt`` of the rule."""
    batch, seqlen_q = q.shape[:2]
    seqlen_k, kv_heads = k.shape[1:3]
    hidden = ~visible(seqlen_q, seqlen_k, causal)
    lowest = torch.finfo(q.dtype).min
    q, k, v, dout = (by_kv_head(t, kv_heads) for t in (q, k, v, dout))
    parts = []
    for some in chunks(q.shape[0], q.shape[1] * seqlen_q * seqlen_k):
        leaves = [t[some].detach().requires_grad_() for t in (q, k, v)]
        scores = (leaves[0] * scale) @ leaves[1].mT
        p = scores.masked_fill(hidden, lowest).softmax(-1).masked_fill(hidden, 0.0)
        parts.append(torch.autograd.grad(p @ leaves[2], leaves, dout[some]))
    dq, dk, dv = (torch.cat(part) for part in zip(*parts, strict=True))
    return from_kv_head(dq, batch), from_kv_head(dk, batch), from_kv_head(dv, batch)


def inputs_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    scale: float | None,
    causal: bool,
) -> tuple[Inputs, Gradients]:
    """The op's inputs, with out and lse of an exact forward rounded once, and fp64 gradients."""
    value = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, *reference = exact_attention(q, k, v, dout, value, causal)
    inputs = Inputs(dout, q, k, v, out.to(q.dtype), lse.float(), scale, causal)
    return inputs, tuple(reference)


@functools.lru_cache(maxsize=1)  # tests run strategies innermost: one problem, many strategies
def judged_inputs(shape: Shape, seed: int = 0) -> tuple[Inputs, Gradients, Gradients]:
    """Normal inputs, their fp64 gradients and plain PyTorch's."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    sizes = shape.q_shape, shape.kv_shape, shape.v_shape, shape.out_shape
    q, k, v, dout = (
        torch.randn(size, generator=generator, device=DEVICE, dtype=shape.dtype) for size in sizes
    )
    inputs, reference = inputs_of(q, k, v, dout, shape.scale, shape.causal)
    plain = plain_gradients(q, k, v, dout, shape.softmax_scale, shape.causal)
    return inputs, reference, plain


def rounding_slack(reference: torch.Tensor, dtype: torch.dtype) -> float:
    """max|((ref + 0.3) - 0.3) - ref| in the dtype: what one add of size 0.3 may cost."""
    rounded = reference.to(dtype)
    return ((rounded + 0.3) - 0.3 - rounded).abs().max().item()


def relative_error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """‖got - ref‖ / ‖ref‖ in fp64."""
    return ((got.double() - reference).norm() / reference.norm()).item()


def assert_accurate(got: Gradients, reference: Gradients, plain: Gradients, what: str = "") -> None:
    """DESIGN.md §6 per tensor: max|x - ref| ≤ 2·max|pt - ref| + 2·max|((ref + 0.3) - 0.3) - ref|.

    The maximum alone would let a whole lost KV tile of a long sequence pass, so the root mean
    square must obey the same rule, with the dtype's rounding of a typical element for the slack.
    """
    for name, x, ref, pt in zip(("dq", "dk", "dv"), got, reference, plain, strict=True):
        assert (x.shape, x.dtype) == (ref.shape, pt.dtype), f"{what} {name}: shape or dtype"
        assert torch.isfinite(x).all(), f"{what} {name} is not finite"
        wrong, allowed = (x.double() - ref).abs(), (pt.double() - ref).abs()
        slack = rounding_slack(ref, x.dtype)
        limit = 2 * allowed.max().item() + 2 * slack
        assert wrong.max().item() <= limit, (
            f"{what} {name}: largest error {wrong.max().item():.3e}, wanted at most {limit:.3e}"
        )
        typical = ref.square().mean().sqrt().item()
        limit = 2 * allowed.square().mean().sqrt().item()
        limit += 2 * torch.finfo(x.dtype).eps * typical + 2e-4
        rms = wrong.square().mean().sqrt().item()
        assert rms <= limit, f"{what} {name}: rms error {rms:.3e}, wanted at most {limit:.3e}"
