"""Experts: recognized in the traces of other libraries, pruned, counted, and written to files."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wirings import WiringError, compact, engine, load_compact, profile, wire_
from wirings.compaction.check_program import check_program
from wirings.compaction.operations import Experts, TopShares, TorchOperator
from wirings.compaction.program import Program

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "head_dim": 8,
        },
    ),
}


def third_party(name: str) -> tuple[nn.Module, dict[str, Any]]:
    importlib.import_module("vision")  # torchvision may not match the installed PyTorch
    transformers = pytest.importorskip("transformers")
    kind, more = MODELS[name]
    config = transformers.AutoConfig.for_model(name, **SIZES, **more)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    return model, {"input_ids": torch.randint(1, 60, (1, 20)), "use_cache": False}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_networks_of_transformers(name: str, tmp_path: Path) -> None:
    model, example = third_party(name)
    wire_(model, "random", density=0.3)
    small = compact(model, example)
    kinds = [type(o) for o in small.program.operations]
    assert kinds.count(Experts) == kinds.count(TopShares) == 2
    assert TorchOperator not in kinds
    ids = torch.randint(1, 60, (3, 20))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(small(input_ids=ids)["logits"], expected, rtol=1e-4, atol=1e-5)
    again = load_compact(small.save(tmp_path / "model.safetensors"))
    assert torch.equal(again(input_ids=ids)["logits"], small(input_ids=ids)["logits"])
    small.save(tmp_path / "model.pt2")  # compares the outputs
    if name == "mixtral":
        pytest.importorskip("onnxruntime")
        small.save(tmp_path / "model.onnx")
    if engine.available():
        fast = engine.compile(small, engine="sparse", threads=2)
        left = [o for segment in fast._segments if segment.plan is None for o in segment.operations]
        assert not any(isinstance(o, (Experts, TopShares)) for o in left)
        assert not left or name == "qwen3_moe"  # whose heads are in an order that has no kernel
        torch.testing.assert_close(fast(input_ids=ids)["logits"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_multiply_adds_are_those_of_the_chosen_experts() -> None:
    model, example = third_party("mixtral")
    small = compact(model, example)
    assert small.report is not None
    assert small.report.uncounted == ()
    routers = 2 * 20 * 4 * 32  # layers, tokens, experts, features
    assert small.report.before.mult_adds == profile(model, example).mult_adds + routers


def experts(gated: bool, activation: str = "silu") -> tuple[Program, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    into, weight = torch.randn(4, 6 * (2 if gated else 1), 5), torch.randn(4, 7, 6)
    into[:, :, 2] = 0  # a channel that nothing reads
    weight[:, :, 4] = 0  # a unit that nothing reads
    operations = [
        TopShares("shares", ("scores",), 2, True, True),
        Experts("y", ("x", "shares"), into, weight, activation, gated, 2),
    ]
    return Program({"x": (5, 9), "scores": (4, 9)}, operations, ("y",)), (torch.randn(2, 5, 9), torch.randn(2, 4, 9))


@pytest.mark.parametrize("gated", [False, True])
def test_units_that_nothing_reads_are_removed(gated: bool) -> None:
    from wirings.compaction.prune import prune

    program, inputs = experts(gated)
    small = prune(program)
    (made,) = (o for o in small.operations if isinstance(o, Experts))
    assert made.into.shape == (4, 10 if gated else 5, 4)
    assert made.weight.shape == (4, 7, 5)
    torch.testing.assert_close(small.run(*inputs)[0], program.run(*inputs)[0])


@pytest.mark.parametrize("gated", [False, True])
def test_all_experts_for_all_tokens_give_the_same(gated: bool) -> None:
    """As on the meta device and in exported programs, where sizes must not depend on values."""
    program, inputs = experts(gated)

    class Run(nn.Module):
        def forward(self, x: Tensor, scores: Tensor) -> Tensor:
            return program.run(x, scores)[0]

    exported = torch.export.export(Run(), inputs).module()
    torch.testing.assert_close(exported(*inputs), program.run(*inputs)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "leaky_relu"}, "one of relu, silu"),
        ({"into": torch.randn(4, 5, 5)}, "a tensor of size"),
        ({"weight": torch.randn(3, 7, 6)}, "shares of 3 experts"),
        ({"weight": torch.randn(7, 6)}, "matrices for the results"),
        ({"count": 5}, "some of the experts"),
        ({"count": 1.0}, "some of the experts"),
    ],
)
def test_invalid_fields_in_files(changes: dict[str, Any], message: str) -> None:
    program, _ = experts(False)
    made = dataclasses.replace(program.operations[1], **changes)
    with pytest.raises(WiringError, match=message):
        check_program(Program(program.inputs, [program.operations[0], made], ("y",)), 2**30)
    for count in (0, 5, True + 0.5):
        with pytest.raises(WiringError, match="some of the channels"):
            check_program(Program({"x": (4, 3)}, [TopShares("y", ("x",), count)], ("y",)), 2**30)  # type: ignore[arg-type]
