"""FlashAttention-2 as PyTorch has it, by the operators under its SDPA: packed and windowed, too."""

from __future__ import annotations

import torch

from dash.bench.shapes import Shape


class Flash2:
    """One problem's forward, run at once, and its backward.

    Its kernels know one head dimension, so a narrower v is padded with zeros beforehand, and
    ``backward`` computes with the padding, as this kernel's users do.
    """

    def __init__(
        self,
        shape: Shape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
    ) -> None:
        self._shape = shape
        self._padding = shape.head_dim - shape.head_dim_v
        causal = shape.causal and not shape.windowed
        self._given = {
            "query": q,
            "key": k,
            "value": self._padded(v),
            "cum_seq_q": cu_seqlens,
            "cum_seq_k": cu_seqlens,
            "max_q": shape.seqlen,
            "max_k": shape.seqlen_k,
            "dropout_p": 0.0,
            "is_causal": causal,
            "return_debug_mask": False,
            "scale": shape.head_dim**-0.5,
            "window_size_left": shape.window_left,
            "window_size_right": 0 if shape.windowed and shape.causal else shape.window_right,
        }
        forward = torch.ops.aten._flash_attention_forward.default
        results = named_call(forward, self._given)
        self._given |= results
        if "rng_state" not in results:  # older names of its two random states
            self._given |= {"rng_state": results["philox_seed"], "unused": results["philox_offset"]}
        self._given |= {"out": results["output"], "logsumexp": results["softmax_logsumexp"]}
        self.out = self._cut(results["output"])
        self.lse = results["softmax_logsumexp"]

    def backward(self, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dq, dk, dv."""
        dq, dk, dv = self.padded_backward(self._padded(dout))
        return dq, dk, self._cut(dv)

    def padded_backward(self, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a benchmark times: dout has ``head_dim`` columns, and so has the dv it returns."""
        backward = torch.ops.aten._flash_attention_backward.default
        known = self._given | {"grad_out": dout}
        return backward(
            *(known[a.name] for a in backward._schema.arguments if not a.kwarg_only),
            **{
                a.name: known[a.name]
                for a in backward._schema.arguments
                if a.kwarg_only and a.name in known
            },
        )

    def _padded(self, t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(t, (0, self._padding)) if self._padding else t

    def _cut(self, t: torch.Tensor) -> torch.Tensor:
        return t[..., : self._shape.head_dim_v].contiguous() if self._padding else t


def named_call(operator: torch._ops.OpOverload, given: dict[str, object]) -> dict[str, object]:
    """Calls an operator by its schema's argument names, which outlast their order.

    Arguments that ``given`` lacks keep their defaults. Returns the results by name.
    """
    known = {a.name: given[a.name] for a in operator._schema.arguments if a.name in given}
    results = operator(**known)
    return dict(zip((r.name for r in operator._schema.returns), results, strict=True))
