"""Trains a language model twice to the same bits.

    python examples/train_lm.py --steps 100 --log a.jsonl
    python examples/train_lm.py --steps 100 --log b.jsonl
    cmp a.jsonl b.jsonl && echo the same losses, gradients and weights, bit for bit

    torchrun --nproc-per-node 2 examples/train_lm.py …      # FSDP2 over two GPUs
    python examples/train_lm.py --attention sdpa …          # PyTorch's attention: the contrast
    python examples/train_lm.py --size tiny --tokens 256 …  # a minute on a CPU

The log has no times, so that equal runs give equal files. Its first line says what must be equal
for that: model, data, forward pass, order of the sums. docs/stacks/training.md explains it.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from attention_choice import ATTENTIONS, attention_of, describe
from language_model import SIZES, LanguageModel
from packed_text import ORDERS, VOCABULARY, PackedText
from rich.console import Console
from rich.progress import Progress
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from training_state import Log, exact, load, save

import dash

console = Console(highlight=False)


@dataclass(frozen=True)
class Run:
    """What the numbers of a run depend on, beside the software and the GPU; heads the log."""

    size: str
    tokens: int
    longest: int
    learning_rate: float
    seed: int
    attention: str
    forward: str
    strategy: str
    order: str
    recompute: bool


class Trainer:
    """A model over all ranks, its optimizer and data; ``step`` makes one update."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device = run, device
        torch.manual_seed(run.seed)
        model = LanguageModel(SIZES[run.size], VOCABULARY, run.recompute).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # dash computes in 16 bits. Weights, their gradients' sums and the optimizer are fp32; so
        # are the rotations that a block is given.
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision)
        self.model = fully_shard(model, mesh=mesh, mp_policy=precision)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=run.learning_rate, betas=(0.9, 0.95)
        )
        self.text = PackedText(run.tokens, run.tokens // 64, run.longest, run.seed)

    def step(self, step: int, with_checksums: bool) -> dict[str, object]:
        """One update on the documents of ``step``; the record for the log."""
        pack = self.text.pack(step, dist.get_rank(), self.run.order, self.device)
        attend = attention_of(self.run.attention, pack, self.run.forward, self.run.strategy)
        logits = self.model(pack.tokens, pack.positions, attend)
        loss = functional.cross_entropy(logits, pack.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        # Not waited for before the record is made, behind the optimizer's step.
        checksum = dash.checksum(gradients) if with_checksums else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(loss_sum := loss.detach())
        record = {"step": step, "loss": exact(loss_sum.item() / dist.get_world_size())}
        if checksum is not None:
            weights = dash.checksum(dict(self.model.named_parameters()))
            record["gradients"] = str(checksum.all_reduce())
            record["weights"] = str(weights.all_reduce())
            order = self.run.forward, self.run.strategy
            record |= describe(self.run.attention, pack, SIZES[self.run.size], *order)
        return record


def main(
    size: Annotated[str, typer.Option(help="Of the model: " + " or ".join(SIZES))] = "100m",
    tokens: Annotated[int, typer.Option(help="In a step and rank, packed.")] = 16_384,
    longest: Annotated[int, typer.Option(help="Of a document; 0: a quarter of the tokens.")] = 0,
    steps: Annotated[int, typer.Option(help="The step to stop at.")] = 100,
    learning_rate: float = 3e-4,
    seed: int = 0,
    attention: Annotated[str, typer.Option(help=" or ".join(ATTENTIONS))] = "dash",
    forward: Annotated[str, typer.Option(help="dash's forward: auto or a name.")] = "auto",
    strategy: Annotated[str, typer.Option(help="dash's strategy: auto or a name.")] = "auto",
    order: Annotated[str, typer.Option(help="In a pack: " + ", ".join(ORDERS))] = "drawn",
    recompute: Annotated[bool, typer.Option(help="Activation checkpointing.")] = False,
    log: Annotated[Path | None, typer.Option(help="JSON lines, without times.")] = None,
    checksum_every: Annotated[int, typer.Option(help="Steps; 0: never.")] = 10,
    checkpoints: Annotated[Path | None, typer.Option(help="Folder to write them to.")] = None,
    checkpoint_every: int = 50,
    resume: Annotated[Path | None, typer.Option(help="A checkpoint to go on from.")] = None,
) -> None:
    """Trains a Llama-like model on this repository's text, in packed sequences, with FSDP2."""
    for name, value, known in (
        ("--size", size, SIZES), ("--attention", attention, ATTENTIONS), ("--order", order, ORDERS)
    ):  # fmt: skip
        if value not in known:
            raise typer.BadParameter(f"{value!r}; required: {', '.join(known)}", param_hint=name)
    device = start(deterministic=attention != "sdpa")
    run = Run(
        size, tokens, longest or tokens // 4, learning_rate, seed, attention, forward, strategy,
        order, recompute,
    )  # fmt: skip
    trainer = Trainer(run, device)
    first = 0 if resume is None else load(resume, trainer.model, trainer.optimizer)
    records = Log(log)
    versions = {"torch": torch.__version__, "dash": dash.__version__, "device": device_name(device)}
    text = str(dash.checksum(trainer.text.text))  # this checkout's files
    records.write(**asdict(run), **versions, text=text, world=dist.get_world_size())
    count = sum(p.numel() for p in trainer.model.parameters())
    if dist.get_rank() == 0:
        console.print(f"{count / 1e6:.1f}M parameters, {attention} attention, {versions}")
    with Progress(console=console, disable=dist.get_rank() != 0) as progress:
        task = progress.add_task("training", total=steps, completed=first)
        for step in range(first, steps):
            due = checksum_every > 0 and (step + 1) % checksum_every == 0
            record = trainer.step(step, due or step + 1 == steps)
            records.write(**record)
            loss = float.fromhex(record["loss"])
            progress.update(task, advance=1, description=f"loss {loss:.4f}")
            if "weights" in record:
                progress.console.print(record)
            if checkpoints is not None and (step + 1) % checkpoint_every == 0:
                save(checkpoints, step + 1, trainer.model, trainer.optimizer)
    dist.destroy_process_group()


def start(deterministic: bool) -> torch.device:
    """The process group, and every switch that makes the rest of a step repeat."""
    # cuBLAS takes one workspace a stream, whose size decides its kernels: before the first call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in ({} if "RANK" in os.environ else alone | {"MASTER_PORT": "0"}).items():
        os.environ[name] = value
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


if __name__ == "__main__":
    typer.run(main)
