"""Small models of random weights, for kinds of KV cache that SmolLM2 does not have.

The weights are drawn wide enough that attention matters: what a model says depends on
all of its context, and so on every byte of the KV cache.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SLIDING_WINDOW = 64


def save_hybrid(folder: Path) -> Path:
    """Gemma 3: layers of a sliding window and layers of full attention."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    return _save(Gemma3ForCausalLM, config, folder)


def save_mla(folder: Path) -> Path:
    """DeepSeek V2 without experts: multi-head latent attention."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=4,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        max_position_embeddings=2048,
    )
    return _save(DeepseekV2ForCausalLM, config, folder)


def _save(model_class: Any, config: Any, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            continue
        # Small embeddings, or a model that ties them repeats its last token.
        std = 0.02 if "embed" in name else 0.08
        torch.nn.init.normal_(parameter, std=std)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def save_lora(base: Path, folder: Path) -> Path:
    """An adapter of random weights for the attention of the model in ``base``."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((base / "config.json").read_text())
    hidden, rank = config["hidden_size"], 8
    head_size = hidden // config["num_attention_heads"]
    rows = {
        "q_proj": config["num_attention_heads"] * head_size,
        "v_proj": config["num_key_value_heads"] * head_size,
    }
    torch.manual_seed(1)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, size in rows.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden) * 0.05
            weights[f"{name}.lora_B.weight"] = torch.randn(size, rank) * 0.05
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": 16,
        "target_modules": sorted(rows),
        "bias": "none",
        "lora_dropout": 0.0,
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder
