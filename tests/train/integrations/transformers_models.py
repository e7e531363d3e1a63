"""Small Hugging Face models from configurations, with data for the Trainer. Nothing is downloaded."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 64}
DECODER = {**WIDTHS, **SPECIAL, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("CausalLM", {**SPECIAL, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("CausalLM", DECODER),
    "bert": ("MaskedLM", {**WIDTHS, **SPECIAL}),
    "vit": ("ImageClassification", {**WIDTHS, "image_size": 16, "patch_size": 8, "num_labels": 3}),
    "t5": (
        "Seq2SeqLM",
        {
            **SPECIAL,
            **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
            **{"tie_word_embeddings": False},
        },
    ),
    "mixtral": ("CausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("CausalLM", {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}),
    "llama4_text": (
        "CausalLM",
        {
            **{**DECODER, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 8, "intermediate_size_mlp": 64},
            **{"interleave_moe_layer_step": 1, "attn_temperature_tuning": False},
        },
    ),
    "gpt_oss": ("CausalLM", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
}
TOKENS = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(0))
GENERATES = ("gpt2", "llama", "t5", "mixtral", "qwen3_moe", "gpt_oss")


def need_transformers() -> Any:
    """Skip a test if transformers or accelerate cannot be imported; importing them takes seconds."""
    try:
        importlib.import_module("vision")  # transformers imports torchvision if it is installed
        importlib.import_module("accelerate")
        return importlib.import_module("transformers")
    except Exception as error:
        pytest.skip(f"pip install transformers accelerate: {error}")


def auto(kind: str) -> Any:
    """The Auto class of a model."""
    return getattr(need_transformers(), f"AutoModelFor{MODELS[kind][0]}")


def make(kind: str, seed: int = 0, **options: Any) -> Any:
    """A model with new weights, without dropout, so that two trainings are alike."""
    transformers = need_transformers()
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **{**MODELS[kind][1], **options})
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    if hasattr(config, "dropout_rate"):
        config.dropout_rate = 0.0
    return auto(kind).from_config(config).eval()


def rows(kind: str) -> list[dict[str, torch.Tensor]]:
    """Examples for the Trainer."""
    if kind == "vit":
        images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        return [{"pixel_values": image, "labels": torch.tensor(i % 3)} for i, image in enumerate(images)]
    return [{"input_ids": line, "labels": line} for line in TOKENS.repeat(2, 1)]


@torch.no_grad()
def logits(model: Any, kind: str) -> torch.Tensor:
    """The outputs for a fixed batch, in evaluation."""
    batch = rows(kind)[:4]
    return model.eval()(**{name: torch.stack([row[name] for row in batch]) for name in batch[0]}).logits


def trainer(model: Any, kind: str, folder: Path, *callbacks: Any, steps: int = 3, **more: Any) -> Any:
    """A Trainer of a few steps with AdamW."""
    from transformers import Trainer, TrainingArguments

    given: dict[str, Any] = {"save_strategy": "no", **more}
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-3, report_to="none",
        use_cpu=True, disable_tqdm=True, logging_steps=1, lr_scheduler_type="constant", **given,
    )  # fmt: skip
    data = rows(kind)
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))
