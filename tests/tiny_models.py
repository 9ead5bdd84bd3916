"""Tiny random models of Hugging Face transformers, from their own configuration classes."""

from __future__ import annotations

import copy

import torch
import transformers

LAYERS, VOCABULARY, WINDOW = 2, 61, 8
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2, "head_dim": 16}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def _configs() -> dict[str, transformers.PretrainedConfig]:
    return {
        "llama": transformers.LlamaConfig(**_GROUPED),
        "qwen3": transformers.Qwen3Config(**_GROUPED),
        "gemma3": transformers.Gemma3TextConfig(**_GROUPED, **_SLIDING, query_pre_attn_scalar=24),
        "olmo3": transformers.Olmo3Config(**_GROUPED | _SLIDING),
        "gpt_oss": transformers.GptOssConfig(
            **_GROUPED, **_SLIDING, num_local_experts=2, num_experts_per_tok=2
        ),
        # q and k of 24 columns, v of 16; no experts, whose choice jumps with rounding.
        "deepseek_v3": transformers.DeepseekV3Config(
            **_COMMON, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
            qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=LAYERS, num_mtp_layers=0,
        ),
        "modernbert": transformers.ModernBertConfig(
            **_COMMON, local_attention=2 * WINDOW, layer_types=_SLIDING["layer_types"],
            cls_token_id=1, sep_token_id=2,
        ),
    }  # fmt: skip


DECODERS = ("llama", "qwen3", "gemma3", "olmo3", "gpt_oss", "deepseek_v3")
MODELS = (*DECODERS, "modernbert")


def tiny_model(
    name: str, attention: str, dtype: torch.dtype = torch.bfloat16
) -> transformers.PreTrainedModel:
    """The same weights for every ``attention`` and dtype: drawn in bfloat16."""
    config = copy.deepcopy(_configs()[name])
    head = (
        transformers.AutoModelForMaskedLM
        if name == "modernbert"
        else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(0)
    model = head.from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Larger than a fresh model's, so that attention and the sinks matter.
            if parameter.dim() >= 2 or "sinks" in parameter_name:
                parameter.normal_(std=1.0 if "sinks" in parameter_name else 0.15)
    return model.to(dtype).train()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def gradients_of(
    model: transformers.PreTrainedModel, weights: torch.Tensor, **inputs: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Of every parameter, for the sum of logits times ``weights`` ``(batch, seqlen, 1)``."""
    model.zero_grad()
    logits = (
        model(**inputs, use_cache=False).logits if _has_cache(model) else model(**inputs).logits
    )
    generator = torch.Generator().manual_seed(7)
    direction = torch.randn(logits.shape[-1], generator=generator)
    (logits.float() * direction.to(logits.device) * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _has_cache(model: transformers.PreTrainedModel) -> bool:
    return model.config.model_type != "modernbert"
