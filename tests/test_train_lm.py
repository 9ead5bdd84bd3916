"""The training example, tiny, on the CPU: equal runs, a resumed run, another packing order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TINY = {"size": "tiny", "tokens": 96, "longest": 40, "checksum_every": 1}


@pytest.fixture(scope="module")
def train_lm():
    """The example as a module; torch's global switches are put back afterwards."""
    pytest.importorskip("typer")
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    environment = dict(os.environ)
    sys.path.insert(0, str(EXAMPLES))
    import train_lm

    yield train_lm
    sys.path.remove(str(EXAMPLES))
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    os.environ.clear()
    os.environ.update(environment)


def lines(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def first_run(train_lm, tmp_path_factory) -> Path:
    """A folder with the log of three steps and a checkpoint after the second."""
    folder = tmp_path_factory.mktemp("run")
    train_lm.main(**TINY, steps=3, log=folder / "log.jsonl", checkpoints=folder, checkpoint_every=2)
    return folder


def test_the_log_names_what_a_run_depends_on(first_run) -> None:
    header, *steps = lines(first_run / "log.jsonl")
    assert header.keys() >= {"attention", "forward", "strategy", "seed", "torch", "text", "world"}
    assert [step["step"] for step in steps] == [0, 1, 2]
    for step in steps:
        assert step["forward"] == "plain"
        assert len(step["fingerprint"]) == len(step["gradients"]) == len(step["weights"]) == 16
    assert len({step["weights"] for step in steps}) == 3
    assert all(4 < float.fromhex(step["loss"]) < 6 for step in steps)  # ln 256 is 5.5


def test_a_second_run_in_a_fresh_process_gives_the_same_file(first_run, tmp_path) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    log = tmp_path / "log.jsonl"
    paths = (str(EXAMPLES.parent), os.environ.get("PYTHONPATH"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_lm.py"), *words, "--steps=3", f"--log={log}"],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert log.read_bytes() == (first_run / "log.jsonl").read_bytes()


def test_a_resumed_run_goes_on_with_the_same_bits(train_lm, first_run, tmp_path) -> None:
    log = tmp_path / "log.jsonl"
    train_lm.main(**TINY, steps=3, log=log, resume=first_run / "step_000002")
    header, *steps = lines(first_run / "log.jsonl")
    assert lines(log) == [header, steps[2]]


def test_another_seed_gives_another_file(train_lm, first_run, tmp_path) -> None:
    """The comparisons above can fail."""
    log = tmp_path / "log.jsonl"
    train_lm.main(**TINY, steps=1, log=log, seed=1)
    assert lines(log)[1]["weights"] != lines(first_run / "log.jsonl")[1]["weights"]


def documents_of(train_lm, order: str, recompute: bool = False) -> tuple[dict, dict]:
    """One step: (what each document's tokens got, by the order drawn; gradients of weights)."""
    from process_groups import gloo_group

    run = train_lm.Run(
        **{name: TINY[name] for name in ("size", "tokens", "longest")}, learning_rate=1e-3,
        seed=0, attention="dash", forward="auto", strategy="auto", order=order,
        recompute=recompute,
    )  # fmt: skip
    with gloo_group():
        trainer = train_lm.Trainer(run, torch.device("cpu"))
        embedded = []
        trainer.model.embedding.register_forward_hook(
            lambda _module, _inputs, output: (output.retain_grad(), embedded.append(output))[1]
        )
        pack = trainer.text.pack(0, 0, order, torch.device("cpu"))
        attend = train_lm.attention_of("dash", pack, "auto", "auto")
        logits = trainer.model(pack.tokens, pack.positions, attend)
        torch.nn.functional.cross_entropy(logits, pack.targets).backward()
        tokens = zip(
            *(t.split(pack.lengths) for t in (logits.detach(), embedded[0].grad)), strict=True
        )
        weights = {n: p.grad.full_tensor() for n, p in trainer.model.named_parameters()}
        return dict(zip(pack.order, tokens, strict=True)), weights


def test_another_packing_order_changes_no_bit_of_a_document(train_lm) -> None:
    """Logits and the gradients of embedded tokens stay; sums over tokens have another order."""
    drawn, weights = documents_of(train_lm, "drawn")
    assert len(drawn) > 2
    for order in ("reversed", "longest-first"):
        other, other_weights = documents_of(train_lm, order)
        assert other.keys() == drawn.keys()
        for place, (logits, gradient) in drawn.items():
            assert torch.equal(other[place][0], logits)
            assert torch.equal(other[place][1], gradient)
        for name, weight in weights.items():
            assert (other_weights[name] - weight).norm() < 0.02 * weight.norm()


def test_recomputed_activations_give_the_same_gradients(train_lm) -> None:
    _, plain = documents_of(train_lm, "drawn")
    _, recomputed = documents_of(train_lm, "drawn", recompute=True)
    assert all(torch.equal(recomputed[name], weight) for name, weight in plain.items())


def test_sdpa_computes_the_same_loss_to_rounding(train_lm, first_run, tmp_path) -> None:
    log = tmp_path / "log.jsonl"
    train_lm.main(**TINY, steps=1, log=log, attention="sdpa")
    loss, wanted = (
        float.fromhex(lines(path)[1]["loss"]) for path in (log, first_run / "log.jsonl")
    )
    assert loss == pytest.approx(wanted, rel=1e-3)
