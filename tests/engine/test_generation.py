"""Tokens one at a time, with a cache, give what the whole sequence does."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wirings import WiringError, compact, engine, models, wire_
from wirings.compaction.operations import ChannelNorm, MultiplyMap
from wirings.compaction.program import Program

pytestmark = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


def language_model(tokens: int, density: float | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = models.get("gpt", layers=2, width=24, heads=3, context=tokens, classes=11).eval()
    if density is not None:
        wire_(model, "random", density=density, skip=["tokens", "positions", "head"])
    return model


@pytest.mark.parametrize("tokens", [1, 5, 16, 33, 128])
@pytest.mark.parametrize("density", [None, 0.2])
def test_one_token_at_a_time_equals_the_whole_sequence(tokens: int, density: float | None) -> None:
    model = language_model(tokens, density)
    x = torch.randint(11, (1, tokens), generator=torch.Generator().manual_seed(1))
    generator = engine.compile(model, x, engine="sparse", threads=2).generator()
    found = torch.stack([generator.step(int(token)) for token in x[0]])
    torch.testing.assert_close(found, model(x)[0].detach(), rtol=1e-4, atol=1e-5)
    assert generator.count == tokens
    with pytest.raises(WiringError, match=rf"compiled for {tokens} tokens, and all of them are used"):
        generator.step(0)
    generator.reset()
    torch.testing.assert_close(generator.step(int(x[0, 0])), found[0])


class Rotary(nn.Module):
    """A decoder with rotary positions, shared heads of keys and values, an RMS norm and a gated layer."""

    def __init__(self, width: int = 16, tokens: int = 9) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(7, width), nn.RMSNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width // 2), nn.Linear(width, width // 2)
        self.gate, self.up, self.down = nn.Linear(width, 20), nn.Linear(width, 20), nn.Linear(20, width)
        self.head = nn.Linear(width, 7)
        angle = torch.arange(tokens)[:, None] * torch.tensor([1.0, 0.3]).repeat(2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        y = self.norm(x)
        batch, count, _ = y.shape
        q, k, v = (layer(y).view(batch, count, -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        x = x + y.transpose(1, 2).flatten(2)
        return self.head(x + self.down(F.silu(self.gate(x)) * self.up(x)))


def test_tensors_may_have_any_names() -> None:
    """Also the names that the inputs of a network for one token would have."""
    torch.manual_seed(0)
    model, x = Rotary().eval(), torch.randint(7, (1, 9))
    program = engine.compile(model, x, engine="sparse", threads=1).program
    norm = next(o.output for o in program.operations if isinstance(o, ChannelNorm))
    turned = next(o.output for o in program.operations if isinstance(o, MultiplyMap))
    names = {norm: f"{turned}.row", program.operations[-2].output: "position"}
    renamed = [
        replace(o, output=names.get(o.output, o.output), inputs=tuple(names.get(name, name) for name in o.inputs))
        for o in program.operations
    ]
    same = Program(program.inputs, renamed, program.outputs, program.notes)
    generator = engine.compile(same, engine="sparse", threads=1).generator()
    found = torch.stack([generator.step(int(token)) for token in x[0]])
    torch.testing.assert_close(found, model(x)[0].detach(), rtol=1e-4, atol=1e-5)


def test_rotary_positions_and_shared_heads() -> None:
    torch.manual_seed(0)
    model, x = Rotary().eval(), torch.randint(7, (1, 9))
    fast = engine.compile(model, x, engine="sparse", threads=1)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    generator = fast.generator()
    found = torch.stack([generator.step(int(token)) for token in x[0]])
    torch.testing.assert_close(found, model(x)[0].detach(), rtol=1e-4, atol=1e-5)


def test_generated_tokens_are_those_of_the_model() -> None:
    model = language_model(24)
    generator = engine.compile(model, torch.zeros(1, 24, dtype=torch.int64), engine="sparse").generator()
    found = list(generator.generate([3, 1], 20, temperature=0))
    tokens = [3, 1]
    for _ in range(20):  # causal, so that what follows does not matter
        padded = torch.tensor([tokens + [0] * (24 - len(tokens))])
        tokens.append(int(model(padded)[0, len(tokens) - 1].argmax()))
    assert found == tokens[2:]
    drawn = []
    for _ in range(2):
        generator.reset()
        drawn.append(list(generator.generate([3], 10, top_k=2, generator=torch.Generator().manual_seed(5))))
    assert drawn[0] == drawn[1]
    assert all(0 <= token < 11 for token in drawn[0])


def test_two_sequences_are_independent() -> None:
    model = language_model(8)
    fast = engine.compile(model, torch.zeros(1, 8, dtype=torch.int64), engine="sparse")
    one, two = fast.generator(), fast.generator()
    first, second = torch.randint(11, (2, 8))
    pairs = [(one.step(int(a)), two.step(int(b))) for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(torch.stack([a for a, _ in pairs]), model(first[None])[0].detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.stack([b for _, b in pairs]), model(second[None])[0].detach(), rtol=1e-4, atol=1e-5
    )


def test_rejects_other_networks_and_tokens() -> None:
    generator = engine.compile(language_model(4), torch.zeros(1, 4, dtype=torch.int64), engine="sparse").generator()
    for token in (-1, 11):
        with pytest.raises(WiringError, match="expects tokens from 0 to 10, got"):
            generator.step(token)
    with pytest.raises(WiringError, match="at least one token"):
        generator.add([])
    seeing = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    network = nn.Sequential(nn.Embedding(5, 8), seeing)
    with pytest.raises(WiringError, match="attention that also sees later tokens"):
        engine.compile(network, torch.zeros(1, 4, dtype=torch.int64), engine="sparse").generator()
    with pytest.raises(WiringError, match="from tokens to one output"):
        engine.compile(nn.Linear(2, 2), torch.zeros(1, 2), engine="sparse").generator()


class Scaled(nn.Module):
    """A language model without attention, with a function before its head."""

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.table, self.scale, self.head = nn.Embedding(5, 8), nn.Parameter(torch.rand(8)), nn.Linear(8, 5)
        self.beta = beta

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.softplus(self.table(tokens).tanh() * self.scale, beta=self.beta).tanh())


def test_functions_that_the_kernels_do_not_have() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(5, (1, 4))
    plain, other = Scaled(1.0).eval(), Scaled(2.0).eval()
    generator = engine.compile(plain, tokens, engine="sparse").generator()
    found = torch.stack([generator.step(int(token)) for token in tokens[0]])
    torch.testing.assert_close(found, plain(tokens)[0].detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(WiringError, match=r"the kernels cannot compute softplus \(Activation\) for one token"):
        engine.compile(other, tokens, engine="sparse").generator()


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"temperature": "x"}, {"top_k": 0}, {"top_k": -1}, {"length": -1}]
)
def test_rejects_invalid_options_at_once(options: dict[str, Any]) -> None:
    generator = engine.compile(language_model(4), torch.zeros(1, 4, dtype=torch.int64), engine="sparse").generator()
    with pytest.raises(WiringError, match="generate expects a"):
        generator.generate([1], **{"length": 2, **options})
    for token in (1.5, "1", True):
        with pytest.raises(WiringError, match="expects tokens from 0 to 10"):
            generator.step(token)  # type: ignore[arg-type]


def test_torch_is_used_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(5, 8)
    cases = (
        # seconds of the kernels, of the program in PyTorch, and of the model in PyTorch
        ([2.0, 3.0, 1.0], True, False),
        ([1.0, 2.0, 2.0], False, False),
        ([1.0, 0.95, 0.95], False, False),
        ([2.0, 1.0, 3.0], True, True),
        ([2.0, 1.0, 0.5], True, True),
    )
    for seconds, expected, saved in cases:
        monkeypatch.setattr("wirings.engine.engine_model.fastest_of", lambda *calls, clear, seconds=seconds: seconds)
        fast = engine.compile(model, x)
        assert fast.uses_torch == expected
        torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)
        assert ("which is used" in str(fast.report)) == expected
        assert fast.choices.get("on_torch", False) == saved
    assert not engine.compile(model, x, engine="dense").uses_torch


def test_compact_models_use_torch_where_it_is_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval(), torch.randn(5, 8)
    small = compact(model, x)
    measured = []

    def fastest_of(*calls: Any, clear: float) -> list[float]:
        measured.append([call() for call in calls])
        return [2.0, 1.0]

    monkeypatch.setattr("wirings.engine.engine_model.fastest_of", fastest_of)
    for given in (small, small.program):
        assert engine.compile(given).uses_torch
    fast = engine.compile(small)
    assert len(measured) == 3
    torch.testing.assert_close(measured[0][0], measured[0][1], rtol=1e-4, atol=1e-5)
    again = engine.load(fast.save(tmp_path / "fast.safetensors"))
    assert again.uses_torch
    assert copy.deepcopy(again).uses_torch
    assert len(measured) == 3, "the file remembers"
    assert torch.equal(again(x), fast(x))
    assert torch.equal(again(x), small(x))
    small.save(tmp_path / "small.safetensors")
    assert engine.load(tmp_path / "small.safetensors").uses_torch
    assert len(measured) == 4, "the file of a compact model says nothing about it"
    assert not engine.compile(small, engine="sparse").uses_torch
