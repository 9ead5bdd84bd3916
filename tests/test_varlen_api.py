"""The packed operator as PyTorch and its callers see it: schema, checks, transforms."""

from __future__ import annotations

import pytest
import torch
from packs import PackShape, random_pack, same_bits

import dash

SHAPE = PackShape(((40, 40), (0, 7), (70, 90)), 4, 2, causal=True, gaps=(2, 3), tails=(5, 0))
BWD = torch.ops.dash.attention_varlen_bwd


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# ---- What PyTorch checks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overload", "bound"),
    [("default", None), ("default", torch.tensor(90)), ("int_max_seqlen", 90)],
)
def test_opcheck(overload, bound) -> None:
    pack = random_pack(SHAPE)
    tensors = [t.nan_to_num() for t in pack.tensors.values()]
    named = pack.lengths | {"max_seqlen_q": bound, "max_seqlen_k": bound, "causal": True}
    torch.library.opcheck(getattr(BWD, overload), tuple(tensors), named)


@pytest.mark.parametrize("bound", [None, 90])
def test_opcheck_of_the_forward(bound) -> None:
    pack = random_pack(SHAPE)
    q, k, v = (pack.tensors[name].nan_to_num().requires_grad_() for name in "qkv")
    cu_q, cu_k, used_q, used_k = pack.lengths.values()
    rest = (bound, bound, 0.125, True, None, None, used_q, used_k)
    torch.library.opcheck(torch.ops.dash.attention_varlen_fwd, (q, k, v, cu_q, cu_k, *rest))


def test_schema() -> None:
    assert str(BWD.default._schema) == (
        "dash::attention_varlen_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
        "Tensor softmax_lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? max_seqlen_q=None, "
        "Tensor? max_seqlen_k=None, float? softmax_scale=None, bool causal=False, "
        "int? window_left=None, int? window_right=None, Tensor? seqused_q=None, "
        'Tensor? seqused_k=None, str strategy="auto", int group_split=0) '
        "-> (Tensor dq, Tensor dk, Tensor dv)"
    )
    others = str(BWD.int_max_seqlen._schema).replace(".int_max_seqlen", "")
    assert others.replace("SymInt? max", "Tensor? max") == str(BWD.default._schema)


@pytest.mark.parametrize("transposed", [False, True])
def test_outputs_are_contiguous_and_the_fake_says_so(transposed) -> None:
    pack = random_pack(SHAPE)
    if transposed:  # (heads, total, head_dim) in memory
        for name in ("dout", "q", "k", "v", "out"):
            pack.tensors[name] = pack.tensors[name].transpose(0, 1).contiguous().transpose(0, 1)
    real = pack.gradients()
    lengths = {name: t.to("meta") for name, t in pack.lengths.items()}
    fake = BWD(*(t.to("meta") for t in pack.tensors.values()), **lengths)
    for got, imagined, like in zip(real, fake, "qkv", strict=True):
        assert got.is_contiguous()
        assert got.stride() == imagined.stride()
        assert got.shape == imagined.shape == pack.tensors[like].shape
        assert got.dtype == imagined.dtype


def test_layouts_change_no_bit() -> None:
    pack = random_pack(SHAPE)
    before = pack.gradients()
    for name, t in pack.tensors.items():
        wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)
        wide[..., ::2] = t
        pack.tensors[name] = wide[..., ::2]
    for name, t in pack.lengths.items():
        pack.lengths[name] = torch.stack([t, t], dim=1)[:, 0]
    assert all(map(same_bits, pack.gradients(), before))


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("bounded", [False, True])
def test_one_graph_for_all_lengths_and_the_bits_of_eager(bounded) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def loss(q, k, v, cu_seqlens, longest):
        bounds = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        out = dash.attention_varlen(q * 2, k, v, cu_seqlens, causal=True, **bounds)
        return out.float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for lengths in ((40, 70), (5, 6, 80), (129, 2, 3, 4)):
        pack = random_pack(PackShape(tuple((n, n) for n in lengths), 4, 2))
        leaves = [pack.tensors[name].clone().requires_grad_() for name in "qkv"]
        rest = pack.lengths["cu_seqlens_q"], max(lengths) if bounded else None
        wanted = torch.autograd.grad(loss(*leaves, *rest), leaves)
        got = torch.autograd.grad(compiled(*leaves, *rest), leaves)
        assert all(map(same_bits, got, wanted))
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_the_operator_in_a_compiled_function(kind) -> None:
    def grads(tensors, cu_seqlens, longest):
        return BWD(*tensors, cu_seqlens, cu_seqlens, longest, longest, None, True)

    compiled = torch.compile(grads, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((40, 70), (5, 6, 80)):
        pack = random_pack(PackShape(tuple((n, n) for n in lengths)))
        call = (tuple(pack.tensors.values()), pack.lengths["cu_seqlens_q"], kind(max(lengths)))
        assert all(map(same_bits, compiled(*call), grads(*call)))


# ---- Errors --------------------------------------------------------------------------------------

LSE = torch.zeros(4, 117)
ERRORS = [
    ({"q": torch.zeros(1, 9, 4, 64)}, r"q has 4 dimensions, shape \(1, 9, 4, 64\); required: 3"),
    ({"v": torch.zeros(146, 2, 64)}, r"v has dtype torch.float32; required: torch.bfloat16"),
    ({"dout": LSE[:, :64].bfloat16()[None]}, r"dout has shape .*; required: \(121, 4, 64\)"),
    ({"softmax_lse": torch.zeros(121, 4)}, r"softmax_lse has shape \(121, 4\); required: \(heads"),
    ({"softmax_lse": torch.zeros(4, 121).half()}, r"softmax_lse has dtype torch.float16"),
    ({"cu_seqlens_q": int32(0, 1, 2, 3).long()}, r"cu_seqlens_q has dtype torch.int64; required:"),
    ({"cu_seqlens_q": int32(0, 1)[None]}, r"cu_seqlens_q has shape \(1, 2\); required: \(batch"),
    ({"cu_seqlens_q": int32()}, r"cu_seqlens_q has shape \(0,\); required: \(batch \+ 1,\)"),
    (
        {"cu_seqlens_k": int32(0, 40)},
        r"cu_seqlens_k has 2 entries, for 1 seq.* for 3, as cu_seqlens_q",
    ),
    (
        {"seqused_q": int32(1, 2, 3, 4)},
        r"seqused_q has 4 entries, for 4 sequences; required: for 3",
    ),
    ({"seqused_k": int32(1, 2, 3).short()}, r"seqused_k has dtype torch.int16; required: .*int32"),
    ({"strategy": "fastest"}, r"strategy is 'fastest'; required: one of 'auto'"),
    ({"strategy": "symmetric_shift"}, r"strategy is 'symmetric_shift'; required for packed"),
    ({"strategy": "shift"}, r"strategy 'shift' needs a full mask, got a causal"),
    ({"group_split": 3}, r"group_split is 3; required: 0, or a divisor"),
    ({"softmax_scale": float("nan")}, r"softmax_scale is nan; required: a finite number"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[m[:24] for _, m in ERRORS])
def test_error_names_argument_given_and_required(change, message) -> None:
    pack = random_pack(SHAPE)
    with pytest.raises(dash.UnsupportedError, match=message):
        BWD(**(pack.tensors | pack.lengths | {"causal": True} | change))


CONTENTS = [
    ({"cu_seqlens_q": int32(1, 42, 44, 116)}, r"cu_seqlens_q starts with 1; required: 0"),
    (
        {"cu_seqlens_k": int32(0, 43, 10, 146)},
        r"cu_seqlens_k has 10 after 43 at entry 2; required: entries that do not decrease",
    ),
    (
        {"cu_seqlens_q": int32(0, 42, 44, 122)},
        r"cu_seqlens_q ends with 122; required: at most 121, the rows of q",
    ),
    ({"seqused_q": int32(40, 3, 70)}, r"seqused_q is 3 at entry 1; required: from 0 to 2"),
    ({"seqused_k": int32(-1, 3, 70)}, r"seqused_k is -1 at entry 0; required: from 0 to 43"),
]


@pytest.mark.parametrize(("change", "message"), CONTENTS, ids=[m[:24] for _, m in CONTENTS])
def test_the_cpu_checks_what_the_lengths_hold(change, message) -> None:
    pack = random_pack(SHAPE)
    with pytest.raises(dash.UnsupportedError, match=message):
        BWD(**(pack.tensors | pack.lengths | {"causal": True} | change))
    q, k, v = (pack.tensors[name] for name in "qkv")
    with pytest.raises(dash.UnsupportedError, match=message):
        dash.attention_varlen(q, k, v, **(pack.lengths | change))


def test_every_reason_is_said_at_once() -> None:
    pack = random_pack(SHAPE)
    change = {"cu_seqlens_q": int32(0, 1), "seqused_q": int32(1, 2, 3).short()}
    with pytest.raises(dash.UnsupportedError) as error:
        BWD(**(pack.tensors | pack.lengths | change))
    assert len(error.value.reasons) == 4  # two of the batch, one of it for seqused_k, one dtype
