"""dash: the backward pass of attention on Hopper GPUs, bit for bit the same on every run.

torch.ops.dash.attention_bwd    the operator (dash.ops)
dash.attention                  attention that is differentiable through it (dash.interface)
torch.ops.dash.attention_varlen_bwd, dash.attention_varlen, dash.plan_varlen
                                the same for packed sequences (dash.varlen)
dash.plan                       what will run, and the fingerprint of its order (dash.plan)
dash.checksum                   a position-dependent checksum of tensors' bits (dash.checksum)
dash.schedule                   the schedules as graphs: build, simulate, draw
python -m dash                  doctor | bench | verify | demo | schedule | kernels
"""

import importlib
from types import ModuleType

from dash import _namesake, flops, ops  # noqa: F401  _namesake: before all else
from dash.checksum import checksum
from dash.interface import attention
from dash.plan import Plan, plan
from dash.support import UnsupportedError
from dash.varlen import VarlenPlan, attention_varlen, plan_varlen

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "UnsupportedError",
    "VarlenPlan",
    "attention",
    "attention_varlen",
    "checksum",
    "ops",
    "plan",
    "plan_varlen",
]


def __getattr__(name: str) -> ModuleType:
    if name == "schedule":  # on first use: most programs never draw a schedule
        return importlib.import_module("dash.schedule")
    raise AttributeError(f"module 'dash' has no attribute {name!r}")
