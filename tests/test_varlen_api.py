"""The packed operator as PyTorch and its callers see it: schema, checks, transforms."""

from __future__ import annotations

import pytest
import torch
from packs import Pack, PackShape, all_same, assert_bits_of_dense, random_pack, same_bits
from torch.utils.flop_counter import FlopCounterMode

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
        'Tensor? seqused_k=None, str strategy="auto", int group_split=0, Tensor? dlse=None) '
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
    ({"dlse": torch.zeros(121, 4)}, r"dlse has shape \(121, 4\); required: \(heads, total_q\)"),
    ({"dlse": torch.zeros(4, 121).half()}, r"dlse has dtype torch.float16; required: .*float32"),
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


NOT_TENSORS = ("dout", "q", "k", "v", "out", "softmax_lse", "cu_seqlens_q", "cu_seqlens_k")


@pytest.mark.parametrize("name", NOT_TENSORS)
def test_none_is_no_tensor(name) -> None:
    """PyTorch takes None for a tensor argument."""
    pack = random_pack(SHAPE)
    call = pack.tensors | pack.lengths | {name: None}
    with pytest.raises(dash.UnsupportedError, match=f"{name} is None, a NoneType; required"):
        BWD(**call)
    if name in ("q", "k", "v", "cu_seqlens_q"):
        arguments = {n: call[n] for n in ("q", "k", "v", *pack.lengths)}
        with pytest.raises(dash.UnsupportedError, match=f"{name} is None, a NoneType; required"):
            dash.attention_varlen(**arguments)


@pytest.mark.parametrize("rank", [0, 1, 2, 4])
def test_every_rank_is_checked_before_it_is_used(rank) -> None:
    wrong = torch.zeros((3,) * rank, dtype=torch.bfloat16)
    with pytest.raises(dash.UnsupportedError, match=f"q has {rank} dimensions"):
        dash.attention_varlen(wrong, wrong, wrong, int32(0, 3))
    with pytest.raises(dash.UnsupportedError, match=f"q has {rank} dimensions"):
        BWD(*(wrong,) * 5, torch.zeros(3, 3), int32(0, 3), int32(0, 3))


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


@pytest.mark.parametrize(
    ("strategy", "causal", "refusal"),
    [
        ("zigzag", True, None),
        ("spt", True, None),
        ("staggered", False, None),
        ("spt", False, "needs a causal mask"),
        ("shift", False, "needs a full mask"),
    ],
)
def test_a_named_strategy_must_do_without_the_window_too(strategy, causal, refusal) -> None:
    """A sequence too short for the window is a problem without it."""
    pack = random_pack(PackShape(((200, 200), (9, 9)), causal=causal, window_left=20))
    if refusal is None:
        assert_bits_of_dense(pack, pack.gradients(strategy), strategy)
    else:
        with pytest.raises(dash.UnsupportedError, match=refusal):
            pack.gradients(strategy)


@pytest.mark.parametrize("name", ["window_left", "window_right"])
@pytest.mark.parametrize("size", [-1, -(2**31)])
def test_windows_are_checked(name, size) -> None:
    pack = random_pack(SHAPE)
    with pytest.raises(dash.UnsupportedError, match=f"{name} is {size}; required: None, or"):
        pack.gradients(**{name: size})


def test_softmax_scale_takes_no_gradient() -> None:
    q, k, v = (random_pack(SHAPE).tensors[name] for name in "qkv")
    scale = torch.tensor(0.1, requires_grad=True)
    with pytest.raises(dash.UnsupportedError, match="softmax_scale is a Tensor"):
        dash.attention_varlen(q, k, v, int32(0, 9), softmax_scale=scale)


# ---- Autocast, derivatives, torch.func, FLOPs ----------------------------------------------------


def leaves_of(pack: Pack) -> list[torch.Tensor]:
    return [pack.tensors[name].clone().requires_grad_() for name in "qkv"]


def test_autocast_reaches_into_nothing() -> None:
    pack = random_pack(PackShape(((40, 40), (70, 70)), dtype=torch.float16))
    leaves, cu = leaves_of(pack), pack.lengths["cu_seqlens_q"]
    wanted = dash.attention_varlen(*leaves, cu)
    wanted_grads = torch.autograd.grad(wanted, leaves, pack.tensors["dout"])
    with torch.autocast("cpu", torch.bfloat16):
        out = dash.attention_varlen(*leaves, cu)
        assert dash.attention_varlen(*(t.float() for t in leaves), cu).dtype == torch.bfloat16
    assert same_bits(out, wanted)
    assert all_same(torch.autograd.grad(out, leaves, pack.tensors["dout"]), wanted_grads)


def test_the_default_dtype_changes_no_bit() -> None:
    pack = random_pack(SHAPE)
    before = pack.gradients()
    torch.set_default_dtype(torch.float64)
    try:
        assert all_same(pack.gradients(), before)
    finally:
        torch.set_default_dtype(torch.float32)


def test_func_grad_has_the_bits_of_autograd() -> None:
    pack = random_pack(PackShape(((40, 40), (70, 70)), 4, 2))
    leaves, cu = leaves_of(pack), pack.lengths["cu_seqlens_q"]

    def loss(q, k, v):
        return dash.attention_varlen(q, k, v, cu, causal=True).float().square().sum()

    wanted = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*(t.detach() for t in leaves))
    assert all_same(got, wanted)


def test_vmap_has_the_bits_of_a_loop() -> None:
    """Two packs of the same totals with other lengths, and gradients of each."""
    packs = [random_pack(PackShape(((n, n), (110 - n, 110 - n)), 4, 2), n) for n in (40, 70)]
    cu = torch.stack([p.lengths["cu_seqlens_q"] for p in packs])

    def loss(q, k, v, cu):
        return dash.attention_varlen(q, k, v, cu, causal=True).float().square().sum()

    q, k, v = (torch.stack([p.tensors[name] for p in packs]) for name in "qkv")
    out = torch.vmap(lambda *t: dash.attention_varlen(*t, causal=True))(q, k, v, cu)
    grads = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v, cu)
    for index, pack in enumerate(packs):
        leaves = leaves_of(pack)
        assert same_bits(out[index], dash.attention_varlen(*leaves, cu[index], causal=True))
        wanted = torch.autograd.grad(loss(*leaves, cu[index]), leaves)
        assert all_same([g[index] for g in grads], wanted)


def test_forward_mode_derivatives_are_a_clear_error() -> None:
    pack = random_pack(PackShape(((40, 40),)))
    q, k, v = (pack.tensors[name] for name in "qkv")
    cu = pack.lengths["cu_seqlens_q"]
    with pytest.raises(NotImplementedError, match=r"attention_varlen.*forward-mode"):
        torch.func.jvp(lambda q: dash.attention_varlen(q, k, v, cu), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match=r"attention_varlen.*forward-mode"):
            dash.attention_varlen(dual, k, v, cu)
        with pytest.raises(NotImplementedError, match=r"attention_varlen_bwd.*forward-mode"):
            BWD(dual, q, k, v, q, torch.zeros(2, 40), cu, cu)


@pytest.mark.parametrize("gaps", [(0, 0), (3, 5)])
def test_flops_are_counted_sequence_by_sequence(gaps) -> None:
    lengths = ((40, 40), (0, 7), (70, 90))
    pack = random_pack(PackShape(lengths, 4, 2, gaps=gaps))
    q, k, v = leaves_of(pack)
    with FlopCounterMode(display=False) as counter:
        out = dash.attention_varlen(q, k, v, **pack.lengths)
        out.backward(pack.tensors["dout"].nan_to_num())
    assert counter.get_total_flops() == 7 * 2 * 4 * 64 * (40 * 40 + 70 * 90)
