"""Transformers of Hugging Face and timm, made from small configurations: wired, compact, saved and compiled."""

from pathlib import Path
from typing import Any

import pytest
import torch
import vision
from torch import Tensor, nn

from wirings import compact, engine, finalize_, load_compact, profile, wire_
from wirings.compaction.operations import Attention, MultiplyMap, TorchOperator

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def made(config: str, model: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    found: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return found.eval()


def tokens(batch: int) -> Tensor:
    return torch.randint(1, 40, (batch, 9))


def bert() -> tuple[nn.Module, Any, Any]:
    model = made("BertConfig", "BertModel", **SIZES, intermediate_size=24)
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    example = {"input_ids": tokens(1), "attention_mask": mask[:1]}
    return model, example, {"input_ids": tokens(3), "attention_mask": mask}


def gpt2() -> tuple[nn.Module, Any, Any]:
    options = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    model = made("GPT2Config", "GPT2LMHeadModel", **options, bos_token_id=1, eos_token_id=2)
    return model, {"input_ids": tokens(1), "use_cache": False}, {"input_ids": tokens(3)}


def llama() -> tuple[nn.Module, Any, Any]:
    model = made("LlamaConfig", "LlamaForCausalLM", **SIZES, intermediate_size=24, num_key_value_heads=2)
    return model, {"input_ids": tokens(1), "use_cache": False}, {"input_ids": tokens(3)}


def vit() -> tuple[nn.Module, Any, Any]:
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    model = made("ViTConfig", "ViTForImageClassification", **sizes, intermediate_size=24, image_size=16, patch_size=8)
    return model, {"pixel_values": torch.randn(1, 3, 16, 16)}, {"pixel_values": torch.randn(3, 3, 16, 16)}


def timm_vit() -> tuple[nn.Module, Any, Any]:
    if vision.MISSING:
        pytest.skip(vision.MISSING)
    timm = pytest.importorskip("timm")
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **options).eval()
    return model, {"x": torch.randn(1, 3, 16, 16)}, {"x": torch.randn(3, 3, 16, 16)}


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize("make", [bert, gpt2, llama, vit, timm_vit])
def test_third_party_transformers(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, example, given = make()
    wire_(model, "random", density=0.3)
    finalize_(model)
    fixed = {key: value for key, value in example.items() if not isinstance(value, Tensor)}
    with torch.no_grad():
        expected = model(**given, **fixed)
    expected = expected if isinstance(expected, Tensor) else expected[0]

    def check(found: Any) -> None:
        found = found if isinstance(found, Tensor) else found[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    small = compact(model, example)
    check(small(**given))
    assert sum(isinstance(o, Attention) for o in small.program.operations) == 2
    assert small.report is not None
    before, after = small.report.before, small.report.after
    assert before.mult_adds == profile(model, example).mult_adds
    assert after.mult_adds <= before.mult_adds
    tables = {id(o): o.map for o in small.program.operations if isinstance(o, MultiplyMap)}
    computed = sum(len(x.unique()) for x in tables.values())  # rotary embeddings, which are not parameters of the model
    assert after.parameters <= before.parameters + computed
    check(load_compact(small.save(tmp_path / "model.safetensors"))(**given))
    fast = engine.compile(small, engine="sparse", threads=2)
    check(fast(**given))
    if fast.compiled:  # PyTorch computes masks and positions at most
        left = [o for segment in fast._segments if segment.plan is None for o in segment.operations]
        assert all(isinstance(o, TorchOperator) for o in left)
        assert len(fast._segments) <= 2
