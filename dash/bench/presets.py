"""Named sets of problems: the paper's grid, models' attention, packed batches, windows.

Sizes are those of the models' published configurations. A model's lengths share a number of tokens,
so that every row has about the same work.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from dash.bench.shapes import Shape, packed_shape, select_shapes

MODEL_TOKENS = 8192
MODEL_SEQLENS = (2048, 4096, 8192, 16_384, 32_768)
QUICK = 6  # problems

PACKINGS = {
    "16 x 1024": (1024,) * 16,
    "lognormal": (
        37, 211, 1530, 880, 64, 2901, 412, 5120, 129, 733, 96, 1288, 310, 2047, 15, 611,
    ),
    "one long": (8192, *(128,) * 64),
    "short": (191, 256, 77, 320, 129, 64, 415, 203) * 8,
    "mixed 32k": (9001, 417, 2500, 63, 5120, 1111, 8192, 300, 2047, 640, 3377),
}  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """Attributes: name; what it is, a sentence; its problems, from short to long in each family."""

    name: str
    about: str
    shapes: tuple[Shape, ...]

    def quick(self) -> tuple[Shape, ...]:
        """At most ``QUICK`` problems, spread over the families."""
        if len(self.shapes) <= QUICK:
            return self.shapes
        last = len(self.shapes) - 1
        places = {round(i * last / (QUICK - 1)) for i in range(QUICK)}
        return tuple(self.shapes[place] for place in sorted(places))


def model(heads: int, kv_heads: int, head_dim: int, **more: object) -> tuple[Shape, ...]:
    """A causal model's attention over ``MODEL_SEQLENS``."""
    return tuple(
        Shape(max(1, MODEL_TOKENS // seqlen), seqlen, heads, kv_heads, head_dim, True, **more)
        for seqlen in MODEL_SEQLENS
    )


def packed(head_dim: int = 128) -> tuple[Shape, ...]:
    kinds = ((16, 16, True), (16, 16, False), (32, 8, True))
    return tuple(
        packed_shape(lengths, heads, kv_heads, head_dim, causal)
        for (heads, kv_heads, causal), lengths in itertools.product(kinds, PACKINGS.values())
    )


def windows(head_dim: int = 128) -> tuple[Shape, ...]:
    """A window of w tokens, as models count: w - 1 keys to the left. Then encoders' two sides."""
    causal = ((4, 4096, 128), (2, 8192, 1024), (2, 8192, 4096), (1, 32_768, 4096))
    shapes = [
        Shape(batch, seqlen, heads, kv_heads, head_dim, True, window_left=window - 1)
        for (heads, kv_heads), (batch, seqlen, window) in itertools.product(
            ((16, 16), (32, 8)), causal
        )
    ]
    shapes += [
        Shape(2, 8192, 12, 12, 64, False, window_left=side, window_right=side) for side in (64, 128)
    ]
    return tuple(shapes)


def gpt_oss() -> tuple[Shape, ...]:
    """Every other layer sees 128 tokens; the sinks are outside of the backward's kernel."""
    return model(64, 8, 64) + model(64, 8, 64, window_left=127)


def gemma3() -> tuple[Shape, ...]:
    """12B: five layers of a 1,024 window for each global one."""
    return model(16, 8, 256) + model(16, 8, 256, window_left=1023)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "paper",
            "the DASH paper's grid: 16k tokens, hidden 2,048, full and causal, D64 and D128",
            tuple(
                select_shapes(
                    ("full", "causal"), (64, 128), (512, 1024, 2048, 4096, 8192, 16_384), False
                )
            ),
        ),
        Preset("llama3-8b", "Llama-3-8B: 32 heads, 8 of k and v, D128, causal", model(32, 8, 128)),
        Preset("qwen2.5-7b", "Qwen2.5-7B: 28 heads, 4 of k and v, D128, causal", model(28, 4, 128)),
        Preset("mixtral-8x7b", "Mixtral-8x7B: 32/8 heads, D128, causal", model(32, 8, 128)),
        Preset(
            "sd3.5",
            "Stable Diffusion 3.5 Large: 38 heads, D64, full; 4,096 patches alone and with text",
            (Shape(16, 4096, 38, 38, 64), Shape(16, 4429, 38, 38, 64)),
        ),
        Preset(
            "sam-h",
            "SAM ViT-H: 16 heads, D80, full; global layers, and windows of 14 x 14 patches",
            (Shape(16, 4096, 16, 16, 80), Shape(400, 196, 16, 16, 80)),
        ),
        Preset(
            "llada-1b",
            "LLaDA-1B: 32 heads, 4 of k and v, D64, full",
            (Shape(16, 1024, 32, 4, 64), Shape(16, 4096, 32, 4, 64), Shape(2, 8192, 32, 4, 64)),
        ),
        Preset("packed", "packed sequences of five kinds, D128", packed()),
        Preset("packed-d64", "packed sequences of five kinds, D64", packed(64)),
        Preset("windows", "sliding windows, D128; two-sided ones, D64", windows()),
        Preset("windows-d64", "sliding windows, two-sided ones among them, D64", windows(64)),
        Preset(
            "gpt-oss", "gpt-oss: 64/8 heads, D64, causal, every other layer a window", gpt_oss()
        ),
        Preset(
            "deepseek-v3",
            "DeepSeek-V3: 128 heads, D192 of q and k, D128 of v, causal",
            tuple(
                Shape(max(1, 4096 // s), s, 128, 128, 192, True, head_dim_v=128)
                for s in (1024, 4096, 8192)
            ),
        ),
        Preset(
            "d192-v128",
            "16 heads, D192 of q and k, D128 of v, full and causal",
            tuple(
                Shape(8192 // s, s, 16, 16, 192, causal, head_dim_v=128)
                for causal in (False, True)
                for s in (1024, 4096, 8192)
            ),
        ),
        Preset(
            "gemma3", "Gemma-3-12B: 16/8 heads, D256, causal, five of six layers a window", gemma3()
        ),
    )
}
