"""Checkpoints of a sharded model and its optimizer, and the log that runs are compared by."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes ``folder/step_000100``, each rank its shards; a collective call."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": step}
    dcp.save(state, checkpoint_id=folder / f"step_{step:06d}")


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads a folder that ``save`` wrote and returns its step; a collective call."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"]


class Log:
    """One JSON object a line, by rank 0, with nothing in it that differs between equal runs."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w") if path is not None and dist.get_rank() == 0 else None

    def write(self, **record: object) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def exact(value: float) -> str:
    """All bits of a number, as text."""
    return float(value).hex()
