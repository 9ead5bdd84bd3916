"""The forwards of attention_varlen: which is taken, and what is made of kernels of others.

A stand-in plays the kernel of a GPU: it attends to each sequence, leaves NaN in the rows of none,
takes no gaps, and may return lse padded as some PyTorch releases do.
"""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from packs import PackShape, length_tensors, random_pack, same_bits

import dash
from dash.mask import Mask
from dash.varlen import forward as forwards
from dash.varlen.forward import FORWARDS, Forward, Pack, choose_forward
from dash.varlen.rows import close_gaps, keyless_rows, owners

SHAPE = PackShape(((40, 40), (0, 7), (70, 90), (3, 0), (1, 1)), 4, 2, causal=True)


def pack_of(shape: PackShape, **more: object) -> Pack:
    pack = random_pack(shape)
    lengths = pack.lengths
    return Pack(
        *(pack.tensors[name] for name in "qkv"), lengths["cu_seqlens_q"], lengths["cu_seqlens_k"],
        None, None, 0.125, shape.causal, shape.window_left, shape.window_right,
        lengths.get("seqused_q"), lengths.get("seqused_k"),
    )._replace(**more)  # fmt: skip


# ---- Which is taken ------------------------------------------------------------------------------


def test_the_cpu_has_the_plain_forward_and_says_why_not_the_others() -> None:
    pack = pack_of(SHAPE)
    assert choose_forward(pack, "auto") == choose_forward(pack, "plain") == "plain"
    for name in ("fa3", "flash"):
        with pytest.raises(dash.UnsupportedError, match=f"'{name}', and .*a CUDA device"):
            choose_forward(pack, name)


def test_an_unknown_forward_is_refused() -> None:
    q, k, v, cu_seqlens, *_ = pack_of(SHAPE)
    message = "forward is 'fa5'; required: one of 'auto', 'fa3', 'flash', 'plain'"
    with pytest.raises(dash.UnsupportedError, match=message):
        dash.attention_varlen(q, k, v, cu_seqlens, forward="fa5")


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("installed", "built", "scale", "sequences", "wanted"),
    [
        (True, True, 0.125, 5, "fa3"),
        (False, True, 0.125, 5, "flash"),
        (False, False, 0.125, 5, "plain"),
        (True, True, -0.125, 5, "plain"),
        (True, True, 0.0, 5, "plain"),
        (True, True, 0.125, 65_536, "fa3"),
        (False, True, 0.125, 65_535, "flash"),
        (False, True, 0.125, 65_536, "plain"),
    ],
)
def test_auto_takes_the_best(monkeypatch, installed, built, scale, sequences, wanted) -> None:
    package = types.SimpleNamespace(flash_attn_varlen_func=None) if installed else None
    monkeypatch.setattr(forwards, "fa3_package", lambda: package)
    monkeypatch.setattr(forwards, "why_no_fa3", lambda: "it is not installed")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: built)
    pack = pack_of(SHAPE, scale=scale, cu_seqlens_q=torch.zeros(sequences + 1, dtype=torch.int32))
    pack = pack._replace(q=pack.q.as_subclass(OnCuda))
    assert choose_forward(pack, "auto") == wanted


# ---- What is made of kernels of others -----------------------------------------------------------


class Kernel:
    """Attends sequence by sequence; the rest of its outputs is NaN."""

    def __init__(self, padded_lse: bool) -> None:
        self.padded_lse = padded_lse
        self.bounds = None

    def __call__(self, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
        self.bounds = pack.bounds
        assert pack.q.stride(-1) == 1
        total, heads, _ = pack.q.shape
        out, lse = FORWARDS["plain"].run(pack._replace(seqused_q=None, seqused_k=None))
        outside = ~owners(pack.cu_seqlens_q, None, total).inside
        out, lse = out.masked_fill(outside[:, None, None], torch.nan), lse.masked_fill(outside, 7.0)
        out = out.transpose(0, 1).contiguous().transpose(0, 1)  # as like q as kernels make it
        if not self.padded_lse:
            return out, lse
        batch = pack.cu_seqlens_q.shape[0] - 1
        padded = torch.full((batch, heads, pack.bounds[0]), torch.nan)
        for index, (start, end) in enumerate(itertools.pairwise(pack.cu_seqlens_q)):
            padded[index, :, : end - start] = lse[:, start:end]
        return out, padded


@pytest.mark.parametrize("padded_lse", [False, True])
@pytest.mark.parametrize("gaps", [(0, 0), (3, 0), (0, 5), (2, 3)])
@pytest.mark.parametrize("tails", [(0, 0), (6, 4)])
@pytest.mark.parametrize("bound", [None, 70, 10_000])
def test_kernels_of_others_are_completed(padded_lse, gaps, tails, bound) -> None:
    shape = PackShape(SHAPE.lengths, 4, 2, causal=True, gaps=gaps, tails=tails)
    pack = pack_of(shape, max_seqlen_q=bound, max_seqlen_k=bound)
    kernel = Kernel(padded_lse)
    out, lse = forwards._without_gaps(kernel)(pack)
    wanted, wanted_lse = FORWARDS["plain"].run(pack)
    assert same_bits(out, wanted)
    assert torch.equal(lse, wanted_lse)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert kernel.bounds == tuple(min(bound or total, total) for total in map(shape.total, (0, 1)))


@pytest.mark.parametrize("windows", [(None, None), (5, None), (None, 0), (64, 128)])
def test_flash_is_called_by_its_schema(monkeypatch, windows) -> None:
    """PyTorch's operator has no CPU kernel; its schema checks the call with meta tensors."""
    called = {}
    operator = torch.ops.aten._flash_attention_forward.default

    def record(*given: object, **named: object) -> tuple[torch.Tensor, ...]:
        names = [a.name for a in operator._schema.arguments]
        called.update(zip(names, given, strict=False))
        called.update(named)
        assert called.keys() <= set(names)
        return called["query"], torch.zeros(4, 114)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", record)
    left, right = windows
    pack = pack_of(SHAPE, window_left=left, window_right=right, max_seqlen_q=90)
    out, lse = forwards._flash(pack._replace(v=pack.v.mT.contiguous().mT))
    assert (out.shape, lse.shape) == ((114, 4, 64), (4, 114))
    assert (called["max_q"], called["max_k"]) == (90, SHAPE.total(1))
    assert (called["is_causal"], called["return_debug_mask"]) == (True, False)
    assert (called["dropout_p"], called["scale"]) == (0.0, 0.125)
    assert (called["window_size_left"], called["window_size_right"]) == (left, 0)  # causal
    assert called["value"].stride(-1) == 1
    forwards._flash(pack._replace(max_seqlen_q=1))
    assert called["max_q"] == 2  # one row has a path of its own there
    assert torch.equal(called["cum_seq_k"], pack.cu_seqlens_k)


@pytest.mark.parametrize("asks", [False, True])
def test_fa3_is_called_by_its_names(monkeypatch, asks) -> None:
    called = {}

    def older(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
              causal=False, window_size=(-1, -1)):  # fmt: skip
        called.update(locals())
        return q, torch.zeros(4, 114)

    def newer(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
              seqused_k=None, softmax_scale=None, causal=False, window_size=(-1, -1),
              return_attn_probs=False):  # fmt: skip
        called.update(locals())
        return (q, torch.zeros(4, 114)) if return_attn_probs else q

    package = types.SimpleNamespace(flash_attn_varlen_func=newer if asks else older)
    monkeypatch.setattr(forwards, "fa3_package", lambda: package)
    pack = pack_of(SHAPE, window_left=20, max_seqlen_k=90)
    out, lse = forwards._fa3(pack)
    assert (out.shape, lse.shape) == ((114, 4, 64), (4, 114))
    assert (called["max_seqlen_q"], called["max_seqlen_k"]) == (114, 90)
    assert called["window_size"] == (20, 0)
    assert (called["causal"], called["softmax_scale"]) == (True, 0.125)
    assert called["cu_seqlens_q"] is pack.cu_seqlens_q


def test_a_package_that_lacks_something_is_left_for_the_next(monkeypatch) -> None:
    asked = []

    def lacks(*given: object, **named: object) -> None:
        asked.append(1)
        raise RuntimeError("this build has no head_dim 64")

    package = types.SimpleNamespace(flash_attn_varlen_func=lacks)
    monkeypatch.setattr(forwards, "fa3_package", lambda: package)
    monkeypatch.setattr(forwards, "_fa3_lacks", {})
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    pack = pack_of(SHAPE)
    wanted = forwards.run_forward(pack)
    on_cuda = pack._replace(q=pack.q.as_subclass(OnCuda))
    monkeypatch.setitem(FORWARDS, "plain", Forward(lambda pack: None, lambda _: wanted))
    monkeypatch.setitem(FORWARDS, "fa3", FORWARDS["fa3"]._replace(run=forwards._fa3))
    with pytest.warns(RuntimeWarning, match="refused torch.bfloat16, head_dim 64: this build"):
        assert forwards.run_forward(on_cuda) is wanted
    assert forwards.run_forward(on_cuda) is wanted
    assert asked == [1]
    with pytest.raises(dash.UnsupportedError, match=r"forward is 'fa3', and .*no head_dim 64"):
        forwards.run_forward(on_cuda, "fa3")


# ---- Rows and their sequences --------------------------------------------------------------------


def test_owners() -> None:
    assert owners(torch.zeros(1, dtype=torch.int32), None, 3).inside.tolist() == [False] * 3
    cu_seqlens = torch.tensor([0, 0, 3, 3, 5, 5], dtype=torch.int32)
    found = owners(cu_seqlens, None, 7)
    assert found.inside.tolist() == [True] * 5 + [False] * 2
    assert found.sequence[:5].tolist() == [1, 1, 1, 3, 3]
    assert found.position[:5].tolist() == [0, 1, 2, 0, 1]
    used = torch.tensor([0, 1, 0, 2, 0], dtype=torch.int32)
    assert owners(cu_seqlens, used, 7).inside.tolist() == [
        True,
        *[False] * 2,
        True,
        True,
        *[False] * 2,
    ]


@pytest.mark.parametrize("gaps", [(0, 0), (2, 3)])
@pytest.mark.parametrize("right", [None, 0, 1, 40, 1000])
def test_keyless_rows_are_those_of_the_dense_mask(gaps, right) -> None:
    lengths = ((70, 30), (0, 5), (5, 0), (30, 70), (1, 1), (129, 1))
    shape = PackShape(lengths, gaps=gaps, tails=(3, 0))
    cu = length_tensors(shape)
    sides = [cu["cu_seqlens_q"], cu["cu_seqlens_k"], cu.get("seqused_q"), cu.get("seqused_k")]
    found = keyless_rows(owners(sides[0], sides[2], shape.total(0)), *sides, right)
    wanted = torch.ones(shape.total(0), dtype=torch.bool)
    for start, (seqlen_q, seqlen_k) in zip(shape.starts(0), lengths, strict=False):
        mask = Mask.of(seqlen_q, seqlen_k, False, None, right)
        sees = mask.sees(torch.arange(seqlen_q), torch.arange(seqlen_k))
        wanted[start : start + seqlen_q] = ~sees.any(1)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "cu_seqlens", [[5, 1, 9, -3], [2**31 - 1, -(2**31), 0, 4], [0, 100, 100, 200], [9, 9, 9, 9]]
)
def test_garbage_never_leads_outside(cu_seqlens) -> None:
    """The indices that become loads on a GPU stay inside; on the CPU one outside would raise."""
    cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
    for used in (None, torch.tensor([7, -5, 2**31 - 1], dtype=torch.int32)):
        found = owners(cu_seqlens, used, 12)
        assert found.sequence.min() >= 0
        assert found.sequence.max() < 3
        assert found.position.min() >= 0
        if used is not None:
            _, (copied,), back = close_gaps(cu_seqlens, used, torch.arange(12.0)[:, None])
            assert copied.shape == (12, 1)
            assert 0 <= back.min() <= back.max() < 12


def test_close_gaps() -> None:
    shape = PackShape(((3, 3), (0, 0), (2, 2)), gaps=(2, 0), tails=(1, 0))
    lengths = length_tensors(shape)
    rows = torch.arange(12.0)[:, None]
    dense, (copied,), back = close_gaps(lengths["cu_seqlens_q"], lengths["seqused_q"], rows)
    assert dense.tolist() == [0, 3, 3, 5]
    assert dense.dtype == torch.int32
    assert copied[:5, 0].tolist() == [0, 1, 2, 7, 8]
    assert back.tolist() == [0, 1, 2, 0, 0, 0, 0, 3, 4, 0, 0, 0]
