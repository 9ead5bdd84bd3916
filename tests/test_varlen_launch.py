"""The call of the packed kernels, seen from a machine that has none."""

from __future__ import annotations

import types

import pytest
import torch
from packs import Pack, PackShape, random_pack, same_bits

import dash
from dash import _C
from dash.varlen import launch as launches
from dash.varlen.call import PackedCall
from dash.varlen.launch import launch, tma_ready

SHAPE = PackShape(((40, 40), (0, 7), (70, 90)), 4, 2, causal=True, gaps=(2, 0), tails=(5, 1))


@pytest.fixture
def called(monkeypatch) -> dict[str, object]:
    """The keywords of the last ``_C.backward_varlen``."""
    called = {}

    def record(**keywords: object) -> None:
        called.clear()
        called.update(keywords)

    binding = types.SimpleNamespace(
        backward_varlen=record, varlen_workspace_bytes=_C.varlen_workspace_bytes
    )
    monkeypatch.setattr(launches, "extension", lambda: binding)
    monkeypatch.setattr(launches, "_launches", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return called


def call_of(pack: Pack, **more: object) -> PackedCall:
    return PackedCall(**pack.tensors, **pack.lengths, **pack.shape.mask)._replace(**more)


def test_the_call_fits_the_binding(called) -> None:
    pack = random_pack(SHAPE)
    tensors = pack.tensors
    wide = torch.zeros(SHAPE.total(1), 2, 128, dtype=SHAPE.dtype)
    wide[..., :64] = tensors["k"]
    tensors["k"] = wide[..., :64]
    tensors["softmax_lse"] = tensors["softmax_lse"].T.contiguous().T
    dq, dk, dv = launch(call_of(pack, max_seqlen_q=torch.zeros((), device="meta")))
    assert (called["batch"], called["heads"], called["kv_heads"]) == (3, 4, 2)
    assert (called["total_q"], called["total_k"]) == (SHAPE.total(0), SHAPE.total(1))
    assert (called["causal"], called["window_left"], called["window_right"]) == (True, -1, -1)
    assert (called["strategy"], called["group_split"]) == ("auto", 0)
    assert (called["dtype"], called["head_dim"]) == ("bfloat16", 64)
    assert (called["softmax_scale"], called["stream"]) == (0.125, 7)
    assert called["q"] == (tensors["q"].data_ptr(), 4 * 64, 64)
    assert called["k"] == (wide.data_ptr(), 2 * 128, 128)
    assert called["lse"] == (tensors["softmax_lse"].data_ptr(), 1, 4)
    assert "dlse" not in called
    assert called["dq"] == (dq.data_ptr(), 4 * 64, 64)
    assert (called["dk"], called["dv"]) == tuple((t.data_ptr(), 2 * 64, 64) for t in (dk, dv))
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q"):
        assert called[name] == pack.lengths[name].data_ptr()
    assert called["seqused_k"] == 0
    plan = dash.plan_varlen(
        tensors["q"].shape, tensors["k"].shape, SHAPE.dtype, causal=True, device="cpu",
        seqlens_q=[q for q, _ in SHAPE.lengths], seqlens_k=[k for _, k in SHAPE.lengths],
    )  # fmt: skip
    assert called["workspace_bytes"] == plan.workspace_bytes
    assert called["resident_ctas"] == plan.sequences[0].plan.device.resident_ctas
    if not _C.HAS_KERNELS:
        with pytest.raises(RuntimeError, match=r"backward_varlen.. needs the CUDA kernels"):
            _C.backward_varlen(**{**called, "device": 0})


def test_a_gradient_of_lse_is_given_as_lse_is(called) -> None:
    pack = random_pack(SHAPE)
    dlse = torch.zeros(SHAPE.total(0), 4).T
    launch(call_of(pack, dlse=dlse))
    assert called["dlse"] == (dlse.data_ptr(), 1, 4)
    with pytest.raises(dash.UnsupportedError, match="dlse has shape"):
        launch(call_of(pack, dlse=dlse.T))


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out"])
@pytest.mark.parametrize("how", ["expanded", "odd address", "odd stride", "last dim strided"])
def test_what_tma_cannot_read_is_copied(called, name, how) -> None:
    pack = random_pack(PackShape(((40, 40),), 4, 4))
    t = pack.tensors[name]
    if how == "expanded":
        pack.tensors[name] = t[:1].expand(t.shape)
    elif how == "odd address":
        pack.tensors[name] = torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    elif how == "odd stride":
        pack.tensors[name] = torch.zeros(40, 4, 65, dtype=t.dtype)[..., :64]
    else:
        pack.tensors[name] = t.mT.contiguous().mT
    launch(call_of(pack))
    address, *strides = called[name]
    assert address != pack.tensors[name].data_ptr()
    assert address % 16 == 0
    assert strides == [256, 64]


def test_strides_of_a_dimension_of_one_are_those_of_a_contiguous_tensor(called) -> None:
    pack = random_pack(PackShape(((1, 1),), 1, 1))
    for name in ("dout", "q", "k", "v", "out"):
        pack.tensors[name] = pack.tensors[name].as_strided((1, 1, 64), (3, 5, 1))
    launch(call_of(pack))
    assert all(called[name][1:] == (64, 64) for name in ("dout", "q", "k", "v", "out"))


def test_tma_ready_keeps_what_fits_and_every_value() -> None:
    t = torch.randn(6, 4, 64).bfloat16()
    assert tma_ready(t) is t
    heads_first = t.transpose(0, 1).contiguous().transpose(0, 1)
    assert tma_ready(heads_first) is heads_first
    expanded = t[:, :1].expand(6, 4, 64)
    assert same_bits(tma_ready(expanded), expanded)


@pytest.mark.parametrize(
    "empty", [{"q": (0, 4, 64)}, {"k": (0, 2, 64)}, {"cu_seqlens_q": (1,)}], ids=str
)
def test_nothing_is_launched_for_nothing(called, empty) -> None:
    ((name, size),) = empty.items()
    shapes = {"dout": (9, 4, 64), "q": (9, 4, 64), "k": (9, 2, 64), "v": (9, 2, 64)}
    if name == "q":
        shapes |= {"dout": size, "q": size}
    if name == "k":
        shapes |= {"k": size, "v": size}
    tensors = {n: torch.full(s, torch.nan, dtype=torch.bfloat16) for n, s in shapes.items()}
    cu = torch.zeros(1 if name == "cu_seqlens_q" else 2, dtype=torch.int32)
    lse = torch.zeros(4, shapes["q"][0])
    call = PackedCall(
        **tensors, out=tensors["q"], softmax_lse=lse, cu_seqlens_q=cu, cu_seqlens_k=cu
    )
    grads = launch(call)
    assert not called
    assert [g.shape for g in grads] == [shapes[n] for n in "qkv"]
    assert not any(g.any() for g in grads)


# ---- Decisions are remembered by the call's signature --------------------------------------------


def test_a_known_signature_is_checked_once(called, monkeypatch) -> None:
    checked = []
    check = launches.checks.check_call
    monkeypatch.setattr(launches.checks, "check_call", lambda c: (checked.append(c), check(c)))
    for seed in (1, 2):
        launch(call_of(random_pack(SHAPE, seed)))
    assert len(checked) == 1


CHANGES = [
    {"softmax_scale": 0.3}, {"causal": False}, {"strategy": "staggered"}, {"group_split": 2},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_another_value_is_another_call(called, change) -> None:
    pack = random_pack(SHAPE)
    launch(call_of(pack))
    launch(call_of(pack, **change))
    ((name, value),) = change.items()
    assert called[name] == value


def test_a_wrong_call_raises_each_time_also_after_a_right_one(called) -> None:
    pack = random_pack(SHAPE)
    launch(call_of(pack))
    for _ in range(2):
        with pytest.raises(dash.UnsupportedError, match="v has dtype"):
            launch(call_of(pack, v=pack.tensors["v"].half()))
        with pytest.raises(dash.UnsupportedError, match="cu_seqlens_k has dtype"):
            launch(call_of(pack, cu_seqlens_k=pack.lengths["cu_seqlens_k"].long()))
        with pytest.raises(dash.UnsupportedError, match="softmax_scale is nan"):
            launch(call_of(pack, softmax_scale=float("nan")))


def test_what_the_context_refuses_is_an_unsupported_error(called, monkeypatch) -> None:
    def refuse(**keywords: object) -> None:
        raise ValueError("dash: too few SMs")

    launches.extension().backward_varlen = refuse
    with pytest.raises(dash.UnsupportedError, match="dash cannot run this: too few SMs"):
        launch(call_of(random_pack(SHAPE)))
