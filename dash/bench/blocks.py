"""Times whole transformer blocks, forward and backward, with one attention or another in them.

What a user gains from a faster attention is its share of a block. Each attention is timed alone,
too, in the same rounds. Where FlashAttention-3 cannot be called from PyTorch but its backward can
be timed (the wheel for JAX), a block with it is derived: dash's block, less dash's backward, plus
FA3's; such a row says so.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dash
from dash.bench.block_models import Attention, Block, BlockModel
from dash.bench.flash_interface import FA3_MODULE, find_module, version_of
from dash.bench.inputs import normal_inputs
from dash.bench.measure import (
    Call,
    Meter,
    Window,
    seconds_of_a_call,
    sustained_window,
    window_orders,
)
from dash.bench.providers import Unavailable, deterministic_algorithms, first_sentence
from dash.bench.rows import Row, measured, provenance
from dash.bench.run import Absent, Bench
from dash.bench.worker import MODES

BLOCK_PROVIDERS = ("dash", "fa3_nondet", "fa3_det", "cudnn_nondet", "fa2_det")
ALONE = "/attention"


@dataclass(frozen=True)
class BlockAttention:
    """Attributes: what a block calls; its version; what to do around a step."""

    call: Attention
    version: str
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def find_attention(name: str, causal: bool) -> BlockAttention:
    """``name``'s attention with gradients; ``Unavailable`` with the reason."""
    if name == "dash":
        return BlockAttention(
            lambda q, k, v: dash.attention(q, k, v, causal=causal), f"dash {dash.__version__}"
        )
    if name in MODES:
        module = find_module(FA3_MODULE)

        def fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = module.flash_attn_func(q, k, v, causal=causal, deterministic=MODES[name])
            return out[0] if isinstance(out, tuple) else out

        return BlockAttention(fa3, version_of(FA3_MODULE, module))
    version = f"torch {torch.__version__}"
    if name == "cudnn_nondet":
        return BlockAttention(torch_attention(SDPBackend.CUDNN_ATTENTION, causal), version)
    flash = torch_attention(SDPBackend.FLASH_ATTENTION, causal)
    return BlockAttention(flash, version, deterministic_algorithms)


def torch_attention(backend: SDPBackend, causal: bool) -> Attention:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            heads_first = (t.transpose(1, 2) for t in (q, k, v))
            out = scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2)

    return call


class BlockBench:
    """A run over blocks; ``absent`` says which attention had no number, and why."""

    def __init__(self, names: list[str], seconds: float, rounds: int) -> None:
        # cuBLAS repeats its bits only with this, and reads it once a process.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.names, self.seconds, self.rounds = names, seconds, rounds
        self.meter = Meter()
        self.facts = provenance(self.meter)
        self.absent = Absent()
        self._alone: Bench | None = None  # its processes take seconds to start

    def measure(
        self,
        model: BlockModel,
        batch: int,
        seqlen: int,
        advance: Callable[[], None] = lambda: None,
    ) -> Iterator[Row]:
        """Rows of one case, measured ones first."""
        shape, steps = model.shape(batch, seqlen), {}
        versions, repeats = {}, {}
        for name in self.names:
            try:
                attention = find_attention(name, model.causal)
                step = block_step(model, attention, batch, seqlen)
                repeats[name] = repeats_bitwise(step)
                steps |= {name: step, name + ALONE: attention_step(model, attention, batch, seqlen)}
                versions[name] = attention.version
            except (Unavailable, RuntimeError, dash.UnsupportedError) as reason:
                self.absent.add(name, shape, first_sentence(reason))
        windows = self._windows(steps, advance)
        done = {name: self._timed(windows, name) for name in versions}
        for name, times in done.items():
            facts = {"version": versions[name], "bitwise": int(repeats[name]), "derived": 0}
            yield self._row(model, batch, seqlen, name) | facts | times
        yield from self._derived(model, batch, seqlen, done)

    def close(self) -> None:
        if self._alone is not None:
            self._alone.close()

    def _windows(self, steps: dict[str, Call], advance: Callable) -> dict[str, list[Window]]:
        lengths = {name: seconds_of_a_call(step, 2) for name, step in steps.items()}
        windows: dict[str, list[Window]] = {name: [] for name in steps}
        names = list(steps)
        for order in window_orders(len(names), self.rounds):
            for name in (names[place] for place in order):
                window = sustained_window(steps[name], self.seconds, lengths[name], self.meter)
                windows[name].append(window)
            advance()
        return windows

    def _timed(self, windows: dict[str, list[Window]], name: str) -> Row:
        alone = statistics.median(w.ms for w in windows[name + ALONE])
        times = measured(windows[name], 0.0, self.seconds)
        del times["tflops"]
        return {"attention_ms": round(alone, 4), "share": round(alone / times["ms"], 4), **times}

    def _row(self, model: BlockModel, batch: int, seqlen: int, name: str) -> Row:
        sizes = {"model": model.name, "batch": batch, "seqlen": seqlen}
        return {**self.facts, **sizes, "provider": name}

    def _derived(
        self, model: BlockModel, batch: int, seqlen: int, done: dict[str, Row]
    ) -> Iterator[Row]:
        """Blocks with an attention whose backward alone can be timed here."""
        wanted = [name for name in self.names if name in MODES and name not in done]
        if "dash" not in done or not wanted:
            return
        if self._alone is None:
            self._alone = Bench(["dash", *wanted], self.seconds, self.rounds, meter=self.meter)
        rows = {row["provider"]: row for row in self._alone.measure(model.shape(batch, seqlen))}
        for name in wanted:
            if name not in rows or "dash" not in rows:
                continue
            more = rows[name]["ms"] - rows["dash"]["ms"]
            dash_block = done["dash"]
            ms, alone = dash_block["ms"] + more, dash_block["attention_ms"] + more
            facts = {"version": rows[name]["version"], "bitwise": "", "derived": 1}
            times = {"attention_ms": round(alone, 4), "share": round(alone / ms, 4)}
            times |= {"ms": round(ms, 4), "rounds": self.rounds, "seconds": self.seconds}
            yield self._row(model, batch, seqlen, name) | facts | times


def block_step(model: BlockModel, attention: BlockAttention, batch: int, seqlen: int) -> Call:
    """Forward and backward of one block: the gradients of its input and its weights."""
    torch.manual_seed(0)
    where = {"device": "cuda" if torch.cuda.is_available() else "cpu", "dtype": torch.bfloat16}
    block = Block(model, attention.call).to(**where)
    x, dout = (torch.randn(batch, seqlen, model.hidden, **where) for _ in range(2))
    leaves = [x.requires_grad_(), *block.parameters()]

    def step() -> tuple[torch.Tensor, ...]:
        with attention.around():
            return torch.autograd.grad(block(x), leaves, dout)

    return step


def attention_step(model: BlockModel, attention: BlockAttention, batch: int, seqlen: int) -> Call:
    """Forward and backward of the attention alone."""
    dout, *leaves = normal_inputs(model.shape(batch, seqlen))
    leaves = [t.requires_grad_() for t in leaves]

    def step() -> tuple[torch.Tensor, ...]:
        with attention.around():
            return torch.autograd.grad(attention.call(*leaves), leaves, dout)

    return step


def repeats_bitwise(step: Call) -> bool:
    """Whether two steps give the same bits, all weights' gradients included."""
    first, second = step(), step()
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
