"""Packed sequences: attention over many sequences that lie one behind the other.

torch.ops.dash.attention_varlen_bwd    the operator (dash.varlen.ops)
dash.attention_varlen                  attention that is differentiable through it
dash.plan_varlen                       what will run for a list of lengths

The bits of a sequence's gradients are those of the dense call on that sequence alone, for every
packing, order, neighbour and bound. docs/packed.md has the contract.
"""

from dash.varlen import flops, ops  # noqa: F401
from dash.varlen.interface import attention_varlen
from dash.varlen.plan import VarlenPlan, plan_varlen

__all__ = ["VarlenPlan", "attention_varlen", "ops", "plan_varlen"]
