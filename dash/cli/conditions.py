"""Conditions under which gradients must not change a bit; each is tried against the first call's.

``python -m dash verify`` runs them all. A condition says how many calls it compared and how many
had other bits; none of them can be satisfied by remembering a result.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

import dash
from dash.cli.problem import Inputs
from dash.cli.repeats import Gradients, digest, equal_bits, poison

Track = Callable[[Iterable], Iterable]


@dataclass(frozen=True)
class Result:
    """Attributes: the condition; calls compared; how many differed; why it was left out, if so."""

    name: str
    calls: int
    different: int
    skipped: str | None = None

    @property
    def passed(self) -> bool:
        return self.different == 0


@dataclass(frozen=True)
class Subject:
    """A backward pass under test.

    Attributes:
        inputs: its arguments.
        strategy, group_split: its order.
        workspace_bytes: memory that a call takes beside its outputs.
        first: the gradients that all others are compared with.
    """

    inputs: Inputs
    strategy: str
    group_split: int
    workspace_bytes: int
    first: Gradients

    def backward(self) -> Gradients:
        return self.inputs.backward(self.strategy, self.group_split)

    def differs(self, grads: Gradients) -> bool:
        return not equal_bits(grads, self.first)


def repeats(subject: Subject, count: int, track: Track) -> Result:
    """Calls one after another, each with NaN in the memory that it takes."""
    different = 0
    for _ in track(range(count)):
        poison(subject.first, subject.workspace_bytes)
        different += subject.differs(subject.backward())
    return Result("repeats, memory poisoned", count, different)


def beside_other_work(subject: Subject, count: int, track: Track) -> Result:
    """Calls while another stream keeps SMs and memory busy, as communication does."""
    name = "beside work on another stream"
    device = subject.inputs.q.device
    if device.type != "cuda":
        return Result(name, 0, 0, skipped="the CPU has no streams")
    other = torch.cuda.Stream(device)
    square = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
    bytes_to_copy = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    different = 0
    for index in track(range(count)):
        with torch.cuda.stream(other):
            for _ in range(1 + index % 7):  # a different overlap each time
                torch.mm(square, square)
                bytes_to_copy.clone()
        different += subject.differs(subject.backward())
    other.synchronize()
    return Result(name, count, different)


def fresh_processes(subject: Subject, count: int, track: Track) -> Result:
    """The same inputs from a file, in a new process each: another context, allocator, addresses."""
    wanted = digest(subject.first)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inputs.pt"
        tensors = {name: t.cpu() for name, t in subject.inputs.tensors().items()}
        torch.save({"tensors": tensors, "mask": subject.inputs.mask}, path)
        order = subject.strategy, str(subject.group_split), str(subject.inputs.q.device)
        command = [sys.executable, "-m", "dash.cli.fresh", str(path), *order]
        root = Path(dash.__file__).parent.parent
        digests = [
            json.loads(subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout)
            for _ in track(range(count))
        ]
    return Result("fresh processes", count, sum(found != wanted for found in digests))


def packings(subject: Subject, count: int, track: Track, seed: int) -> Result:
    """Each sequence of the batch in packs: shuffled, among neighbours of NaN, before a tail."""
    name = "packings"
    generator = torch.Generator().manual_seed(seed)
    different = 0
    for index in track(range(count)):
        try:
            grads = _packed(subject, generator)
        except dash.UnsupportedError as error:
            if index == 0:
                return Result(name, 0, 0, skipped=str(error))
            raise
        different += subject.differs(grads)
    return Result(name, count, different)


def _packed(subject: Subject, generator: torch.Generator) -> Gradients:
    """dq, dk, dv of the batch, computed in one packed call with other sequences between."""
    inputs, tensors = subject.inputs, subject.inputs.tensors()
    batch, device = inputs.q.shape[0], inputs.q.device
    neighbours = torch.randint(0, 200, (batch + 1,), generator=generator).tolist()
    order = torch.randperm(batch, generator=generator).tolist()
    pieces: dict[str, list[torch.Tensor]] = {key: [] for key in tensors}
    lengths: dict[str, list[int]] = {"q": [], "k": []}
    for row, between in zip((*order, None), neighbours, strict=True):
        for key, t in tensors.items():
            t = t.transpose(1, 2) if key == "softmax_lse" else t
            pieces[key].append(t.new_full((between, *t.shape[2:]), torch.nan))
            if row is not None:
                pieces[key].append(t[row])
        for side in lengths:
            lengths[side] += [between] if row is None else [between, tensors[side].shape[1]]
    packed = {key: torch.cat(parts) for key, parts in pieces.items()}
    packed["softmax_lse"] = packed["softmax_lse"].transpose(0, 1)
    # The last neighbours belong to no sequence: a tail, as padding to a fixed size is.
    bounds = {
        side: torch.tensor([0, *of_side[:-1]]).cumsum(0, dtype=torch.int32).to(device)
        for side, of_side in lengths.items()
    }
    grads = torch.ops.dash.attention_varlen_bwd(
        *packed.values(), bounds["q"], bounds["k"], **inputs.mask,
        strategy=subject.strategy, group_split=subject.group_split,
    )  # fmt: skip
    places = torch.tensor(order).argsort().tolist()

    def rows(grad: torch.Tensor, side: str) -> torch.Tensor:
        starts = bounds[side].tolist()
        return torch.stack([grad[starts[2 * p + 1] : starts[2 * p + 2]] for p in places])

    return tuple(rows(g, side) for g, side in zip(grads, ("q", "k", "k"), strict=True))
