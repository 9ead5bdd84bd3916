"""``attn_implementation="dash"`` in Hugging Face transformers: tiny real models on the CPU."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip(
    "transformers", reason="pip install 'dash-attention[integration]'"
)

from tiny_models import DECODERS, MODELS, WINDOW, gradients_of, tiny_model, tokens  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import dash  # noqa: E402
import dash.compat.transformers as adapter  # noqa: E402

LENGTHS = (13, 1, 22)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    adapter.register()


# ---- Gradients -----------------------------------------------------------------------------------


def padding(side: str) -> torch.Tensor:
    """``(3, longest)`` mask of three rows, one of them whole."""
    lengths = torch.tensor(LENGTHS)[:, None]
    column = torch.arange(max(LENGTHS))[None]
    return column < lengths if side == "right" else column >= max(LENGTHS) - lengths


@pytest.mark.parametrize("pad", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_eagers_within_rounding(name, pad) -> None:
    """Every parameter's, with at most three times the error that eager has in bfloat16."""
    compare_with_eager(name, pad, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_eagers_within_rounding_on_the_gpu(name) -> None:
    compare_with_eager(name, "left", "cuda")


def compare_with_eager(name: str, pad: str, device: str) -> None:
    inputs = {"input_ids": tokens(3, max(LENGTHS)).to(device)}
    if pad != "none":
        inputs["attention_mask"] = padding(pad).long().to(device)
    counted = inputs.get("attention_mask", torch.ones(3, max(LENGTHS), device=device))
    counted = counted[..., None].float()
    exact, eager, ours = (
        gradients_of(tiny_model(name, attention, dtype).to(device), counted, **inputs)
        for attention, dtype in (
            ("eager", torch.float32), ("eager", torch.bfloat16), ("dash", torch.bfloat16),
        )
    )  # fmt: skip
    assert ours.keys() == exact.keys()
    for parameter, wanted in exact.items():
        allowed = 3 * (eager[parameter].float() - wanted).norm() + 0.01 * wanted.norm() + 1e-6
        wrong = (ours[parameter].float() - wanted).norm()
        assert wrong <= allowed, f"{parameter}: {wrong:.3e}, wanted at most {allowed:.3e}"


def test_these_gradients_would_show_another_window() -> None:
    """The comparison above must be able to fail: by one token of the window, or a lost sink."""
    model = tiny_model("gpt_oss", "dash")
    ones, ids = torch.ones(1, 24, 1), tokens(1, 24)
    right = gradients_of(model, ones, input_ids=ids)
    plain, name = adapter.attention, "model.layers.0.self_attn.k_proj.weight"

    def wider(*args, sliding_window=None, **more):
        return plain(*args, sliding_window=sliding_window and sliding_window + 1, **more)

    def without_sink(*args, s_aux=None, **more):
        return plain(*args, **more)

    for changed in (wider, without_sink):
        transformers.AttentionInterface.register("dash", changed)
        try:
            wrong = gradients_of(model, ones, input_ids=ids)
        finally:
            adapter.register()
        assert (wrong[name] - right[name]).norm() > 0.05 * right[name].norm()


# ---- Packed sequences ----------------------------------------------------------------------------


def packed_inputs(form: str) -> dict[str, torch.Tensor]:
    """Keyword arguments that tell a model where the documents of a row are."""
    bounds = torch.tensor((0, *LENGTHS)).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    if form == "position_ids":
        return {"position_ids": positions}
    longest = torch.tensor(max(LENGTHS), dtype=torch.int32)
    inputs = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    return inputs | {"max_length_q": longest, "max_length_k": longest, "position_ids": positions}


def embedded_run(model, embeds: torch.Tensor, grad: torch.Tensor, **inputs):
    """Logits' and the input embeddings' gradient's bits."""
    leaf = embeds.clone().requires_grad_()
    logits = model(inputs_embeds=leaf, **inputs).logits
    logits.backward(grad)
    return logits.detach(), leaf.grad


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("name", DECODERS)
def test_packed_documents_equal_each_alone_bit_for_bit(name, form, use_cache) -> None:
    """With use_cache transformers makes no mask for packed rows: the position ids must do."""
    model = tiny_model(name, "dash").eval()
    total, hidden = sum(LENGTHS), model.config.hidden_size
    embeds = torch.randn(1, total, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    vocabulary = model.config.vocab_size
    grad = torch.randn(1, total, vocabulary, generator=torch.Generator().manual_seed(2)).bfloat16()
    cache = {"use_cache": use_cache}
    packed = embedded_run(model, embeds, grad, **packed_inputs(form), **cache)
    first = 0
    for length in LENGTHS:
        document = slice(first, first + length)
        alone = embedded_run(model, embeds[:, document], grad[:, document], **cache)
        for got, wanted in zip(packed, alone, strict=True):
            assert torch.equal(got[:, document], wanted)
        first += length


@pytest.mark.parametrize("use_cache", [False, True])
def test_rows_of_a_batch_may_each_hold_documents(use_cache) -> None:
    model = tiny_model("llama", "dash").eval()
    positions = torch.stack([torch.arange(20), torch.cat([torch.arange(9), torch.arange(11)])])
    ids = tokens(2, 20)
    with torch.no_grad():
        both = model(input_ids=ids, position_ids=positions, use_cache=use_cache).logits
        for row, document in ((0, slice(0, 20)), (1, slice(0, 9)), (1, slice(9, 20))):
            alone = model(input_ids=ids[row : row + 1, document], use_cache=use_cache).logits
            assert torch.equal(both[row, document], alone[0])


def test_torch_compile_gives_the_same_gradients() -> None:
    """With one break of the graph, where the mask is made; packed and padded, too."""
    padded = {"input_ids": tokens(3, 22), "attention_mask": padding("left").long()}
    packed = {"input_ids": tokens(1, sum(LENGTHS)), **packed_inputs("position_ids")}
    for inputs in (padded, packed):
        ones = torch.ones(*inputs["input_ids"].shape, 1)
        plain = gradients_of(tiny_model("llama", "dash"), ones, **inputs)
        model = tiny_model("llama", "dash")
        model.forward = torch.compile(model.forward, backend="aot_eager", dynamic=False)
        compiled = gradients_of(model, ones, **inputs)
        assert all(torch.equal(compiled[name], grad) for name, grad in plain.items())


def test_modernbert_takes_packed_documents() -> None:
    model = tiny_model("modernbert", "dash").eval()
    embeds = torch.randn(1, sum(LENGTHS), 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    grad = torch.ones(1, sum(LENGTHS), model.config.vocab_size, dtype=torch.bfloat16)
    packed = embedded_run(model, embeds, grad, **packed_inputs("cu_seq_lens"))
    last = slice(sum(LENGTHS) - LENGTHS[-1], None)
    alone = embedded_run(model, embeds[:, last], grad[:, last])
    assert torch.equal(packed[0][:, last], alone[0])
    assert torch.equal(packed[1][:, last], alone[1])


def test_padding_changes_no_bit_of_a_row() -> None:
    model = tiny_model("llama", "dash").eval()
    ids, mask = tokens(3, max(LENGTHS)), padding("left")
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        for row, length in enumerate(LENGTHS):
            start = max(LENGTHS) - length  # transformers counts positions from the padding on
            alone = model(
                input_ids=ids[row : row + 1, start:],
                position_ids=torch.arange(start, max(LENGTHS))[None],
                use_cache=False,
            ).logits
            assert torch.equal(padded[row, start:], alone[0])


def test_generation_with_a_cache_and_left_padding_is_eagers() -> None:
    ids, mask = tokens(3, max(LENGTHS)), padding("left").long()
    said = {}
    for attention in ("eager", "dash"):
        model = tiny_model("gemma3", attention).eval()
        said[attention] = model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    for ours, wanted in zip(said["dash"].logits, said["eager"].logits, strict=True):
        assert (ours.float() - wanted.float()).norm() < 0.03 * wanted.float().norm()
        if not torch.equal(ours.argmax(-1), wanted.argmax(-1)):
            break  # a near tie: from here on the two continue other texts


# ---- What raises ---------------------------------------------------------------------------------


def layer(**more):
    """A layer's call, as a model makes it; ``more`` changes it."""
    q, k, v = (torch.zeros(1, heads, 8, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    module = torch.nn.Module()
    module.is_causal = True
    return adapter.attention(module, q, k, v, more.pop("attention_mask", None), **more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dropout": 0.1}, r"dropout is 0\.1; required: 0\.0"),
        ({"softcap": 50.0}, r"softcap is 50\.0; required: None"),
        ({"output_attentions": True}, "output_attentions is True; required: False"),
        (
            {"attention_mask": torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16)},
            r"attention_mask has shape \(1, 1, 8, 8\); required: \(batch, seqlen\)",
        ),
    ],
)
def test_what_dash_cannot_honour_raises(more, said) -> None:
    assert layer()[0].shape == (1, 8, 4, 16)
    with pytest.raises(dash.UnsupportedError, match=said):
        layer(**more)


def test_a_model_with_another_mask_raises() -> None:
    """Gemma 3's text encoder joins a rule of its own to the causal one."""
    model = tiny_model("gemma3", "dash")
    model.config.use_bidirectional_attention = True
    model.model.config.use_bidirectional_attention = True
    with pytest.raises(dash.UnsupportedError, match="the model's mask has the part"):
        model(input_ids=tokens(1, 8), use_cache=False)


def test_dropout_in_training_raises_from_the_model() -> None:
    model = tiny_model("llama", "dash")
    for block in model.model.layers:
        block.self_attn.attention_dropout = 0.1
    with pytest.raises(dash.UnsupportedError, match=r"dropout is 0\.1"):
        model(input_ids=tokens(1, 8), use_cache=False)


# ---- Nothing waits for the device ----------------------------------------------------------------


@pytest.mark.parametrize("form", ["packed", "padded", "padded with a cache"])
def test_a_layer_reads_no_device_tensor(form) -> None:
    """A fake tensor has no values: whoever asks for one, by int() or nonzero(), raises."""
    module = torch.nn.Module()
    module.is_causal = True
    with FakeTensorMode():
        rows = 30 if form.endswith("cache") else 8
        q, k, v = (
            torch.zeros(2, heads, seqlen, 16, dtype=torch.bfloat16, requires_grad=True)
            for heads, seqlen in ((4, 8), (2, rows), (2, rows))
        )
        mask, more = torch.ones(2, rows, dtype=torch.bool), {}
        if form == "packed":
            bounds, longest = torch.zeros(4, dtype=torch.int32), torch.zeros((), dtype=torch.int32)
            mask, more = None, {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            more |= {"max_length_q": longest, "max_length_k": longest}
        out, _ = adapter.attention(module, q, k, v, mask, sliding_window=WINDOW, **more)
        assert out.shape == (2, 8, 4, 16)
        out.sum().backward()
        assert k.grad.shape == k.shape


@pytest.mark.gpu
def test_no_synchronisation_on_the_gpu() -> None:
    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = (
        torch.randn(1, heads, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    bounds = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
    longest = torch.tensor(156, dtype=torch.int32, device="cuda")
    more = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    more |= {"max_length_q": longest, "max_length_k": longest}
    padded = torch.arange(256, device="cuda")[None] < 200
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for mask, rest in ((None, more), (padded, {}), (None, {})):
            adapter.attention(module, q, k, v, mask, **rest)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize()
