"""A program that trains a tiny model with TRL, as anyone writes one: it knows nothing of dash.

train_with_trl.py ATTENTION FOLDER    prints the losses and each weight's sum of magnitudes
"""

from __future__ import annotations

import json
import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

WORDS = [f"word{number}" for number in range(13)]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        unk_token="<unk>",
    )  # fmt: skip


def main(attention: str, folder: str) -> None:
    set_seed(0)
    model = LlamaForCausalLM._from_config(
        LlamaConfig(
            vocab_size=len(SPECIAL + WORDS), hidden_size=32, intermediate_size=48,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation=attention,
        ),
        dtype="bfloat16",
    )  # fmt: skip
    texts = [" ".join(WORDS[i : i + 3 + i % 7]) for i in range(10)] * 4
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=folder, packing=True, max_length=24, per_device_train_batch_size=2,
            max_steps=2, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
            bf16=True, dataset_num_proc=None, learning_rate=1e-2, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    sums = {name: p.double().abs().sum().item() for name, p in model.named_parameters()}
    print(json.dumps({"losses": losses, "weights": sums}))


if __name__ == "__main__":
    main(*sys.argv[1:])
