"""A pruned GPT-2 is fine-tuned by the Trainer, with all weights or by LoRA, and no zero is lost in its files."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import TOKENS, auto, logits, make, need_transformers, trainer

import wirings
from wirings.selection.nm_groups import strongest_of_groups

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers and PEFT


@pytest.fixture(autouse=True)
def _transformers() -> None:
    need_transformers()


def pruned(how: str) -> tuple[Any, dict[str, Tensor]]:
    """A GPT-2 with zeros as other tools leave them, and where they are."""
    model = make("gpt2")
    if how == "2:4":
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".h." in name and weight.dim() == 2:  # of shape (in, out)
                    weight.mul_(strongest_of_groups(weight, 2, 4, dim=0))
    else:
        wirings.prune_(model, [TOKENS], density=0.5, include=["transformer.h"])
    zeros = {name: p == 0 for name, p in model.named_parameters() if ".h." in name and p.dim() == 2}
    assert {float(mask.float().mean()) for mask in zeros.values()} == {0.5}
    return model, zeros


def check_zeros(model: Any, zeros: dict[str, Tensor]) -> None:
    for name, mask in zeros.items():
        assert torch.equal(model.get_parameter(name) == 0, mask), name


@pytest.mark.parametrize("how", ["2:4", "50 %"])
def test_the_trainer_keeps_the_zeros(how: str, tmp_path: Path) -> None:
    from wirings.train.integrations.hugging_face import WiringTrainerCallback

    model, zeros = pruned(how)
    before = {name: model.get_parameter(name).clone() for name in zeros}
    wiring = wirings.wire_(model, "keep", include=["transformer.h"])
    ours = WiringTrainerCallback(wiring, finalize=False)
    loop = trainer(model, "gpt2", tmp_path, ours, steps=4, save_strategy="steps", save_steps=2, weight_decay=0.1)
    loop.train()
    for folder in (tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"):
        plain = auto("gpt2").from_pretrained(folder)
        check_zeros(plain, zeros)
        again = wirings.rewire_(plain, folder)
        assert [report.edges for report in again.report()] == [report.edges for report in wiring.report()]
    wirings.finalize_(model).save_pretrained(tmp_path / "final")
    final = auto("gpt2").from_pretrained(tmp_path / "final")
    check_zeros(final, zeros)
    assert all(not torch.equal(final.get_parameter(name), was) for name, was in before.items()), "it was trained"
    torch.testing.assert_close(logits(final, "gpt2"), logits(model, "gpt2"))


@pytest.mark.parametrize("how", ["2:4", "50 %"])
def test_the_trainer_keeps_the_zeros_with_lora(how: str, tmp_path: Path) -> None:
    try:
        peft = importlib.import_module("peft")
    except Exception as error:
        pytest.skip(f"pip install peft: {error}")
    model, zeros = pruned(how)
    wirings.wire_(model, "keep", include=["transformer.h"])
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn", "c_proj"], r=4))
    trainer(adapted, "gpt2", tmp_path, steps=4).train()
    merged = wirings.finalize_(wirings.merge_adapters_(adapted))
    merged.save_pretrained(tmp_path / "merged")
    final = auto("gpt2").from_pretrained(tmp_path / "merged")
    check_zeros(final, zeros)
    torch.testing.assert_close(logits(final, "gpt2"), logits(merged, "gpt2"))


def test_files_at_10_percent_are_less_than_half_as_large(tmp_path: Path) -> None:
    model = make("gpt2", n_embd=64, n_positions=16)
    wirings.prune_(model, [TOKENS], density=0.1, include=["transformer.h"])
    model.save_pretrained(tmp_path / "dense")
    small = wirings.save_sparse(model, tmp_path / "sparse.safetensors")
    assert small.stat().st_size < (tmp_path / "dense" / "model.safetensors").stat().st_size / 2
    other = wirings.load_sparse(make("gpt2", seed=1, n_embd=64, n_positions=16), small)
    assert torch.equal(logits(other, "gpt2"), logits(model, "gpt2"))
