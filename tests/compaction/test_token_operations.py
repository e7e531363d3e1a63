"""Operations of transformers: against PyTorch for random shapes, pruned by hand, and invalid fields in files."""

import dataclasses
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from wirings import WiringError, compact, load_compact
from wirings.compaction.check_program import check_program
from wirings.compaction.compact import shrink
from wirings.compaction.operations import (
    Arrange,
    Attention,
    ChannelNorm,
    Conv,
    Embedding,
    MultiplyMap,
    Operation,
    TorchOperator,
)
from wirings.compaction.program import Program
from wirings.compaction.report import program_size


def by_head(x: Tensor, heads: int) -> Tensor:
    """(batch, heads · size, tokens) as (batch, heads, tokens, size)."""
    return x.view(x.shape[0], heads, -1, x.shape[-1]).mT


@pytest.mark.parametrize("seed", range(20))
def test_attention_is_pytorchs(seed: int) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    heads, sharing, tokens = random.choice([1, 2, 3]), random.choice([1, 2, 3]), random.choice([1, 5, 8])
    size, value_size, others = random.choice([1, 4]), random.choice([1, 3]), random.choice([tokens, 6])
    q = torch.randn(3, heads * sharing * size, tokens).double()
    k, v = torch.randn(3, heads * size, others).double(), torch.randn(3, heads * value_size, others).double()
    causal, mask, bias = random.random() < 0.3, None, None
    if random.random() < 0.4:
        mask = torch.randn(random.choice([1, heads * sharing]), tokens, others).double()
    if random.random() < 0.4:
        bias = torch.randn(3, random.choice([1, heads * sharing]), random.choice([1, tokens]), others).double()
    inputs = [q, k, v] if bias is None else [q, k, v, bias]
    sizes, names = ((size,) * heads, (value_size,) * heads), ("q", "k", "v", "b")[: len(inputs)]
    made = Attention("y", names, mask, *sizes, sharing, 0.7, causal)
    added = torch.zeros(tokens, others).double()
    if causal:
        added = added.masked_fill(torch.ones(tokens, others).triu(1).bool(), -math.inf)
    for more in (mask, bias):
        added = added if more is None else added + more
    parts = by_head(q, heads * sharing), by_head(k, heads), by_head(v, heads)
    expected = F.scaled_dot_product_attention(*parts, attn_mask=added, scale=0.7, enable_gqa=True)
    found = by_head(made.run(*inputs), heads * sharing)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("seed", range(10))
def test_embeddings_and_orders_are_pytorchs(seed: int) -> None:
    random = Random(seed)
    ids, table = torch.randint(7, (2, random.randint(1, 9))), torch.randn(7, random.randint(1, 5))
    assert torch.equal(Embedding("y", ("x",), table).run(ids), F.embedding(ids, table).mT)
    a, b, c = (random.randint(1, 4) for _ in range(3))
    x, order = torch.randn(2, a * b, c), [1, 2, 3]
    random.shuffle(order)
    expected = x.view(2, a, b, c).permute(0, *order)
    made = Arrange("y", ("x",), ((a, b), (c,)), (0, *order), (-1, *expected.shape[1:]))
    assert torch.equal(made.run(x), expected)
    maps = torch.randn(a * b, c)
    assert torch.equal(MultiplyMap("y", ("x",), maps).run(x), x * maps)


# ---- pruning by hand ------------------------------------------------------------------------------------------------


def projection(name: str, source: str, weight: Tensor, bias: Tensor | None = None) -> Conv:
    return Conv(name, (source,), weight[:, :, None], bias, (1,), (0,), (1,))


def attend(zeroed: dict[str, list[int]]) -> tuple[Program, Program, Attention | None]:
    """Two heads of three channels over six, with rows of the projections set to zero; the same, compact."""
    torch.manual_seed(0)
    weights = {name: torch.randn(6, 6).double() for name in ("q", "k", "v")}
    biases = {name: torch.randn(6).double() for name in weights}
    out = torch.randn(4, 6).double()
    for name, rows in zeroed.items():
        if name == "out":
            out[:, rows] = 0
        else:
            weights[name][rows] = 0
    operations: list[Operation] = [projection(name, "x", weights[name], biases[name]) for name in weights]
    operations += [Attention("a", ("q", "k", "v"), None, (3, 3), (3, 3), 1, 0.5), projection("y", "a", out)]
    program = Program({"x": (6, 5)}, operations, ("y",))
    small = shrink(program)
    x = torch.randn(3, 6, 5).double()
    torch.testing.assert_close(small.run(x)[0], program.run(x)[0])
    return program, small, next((o for o in small.operations if isinstance(o, Attention)), None)


def test_dead_heads_are_removed() -> None:
    for zeroed in ({"v": [0, 1, 2]}, {"out": [0, 1, 2]}):
        _, small, attention = attend(zeroed)
        assert attention is not None
        assert (attention.sizes, attention.value_sizes) == ((3,), (3,))
        rows = [o.weight.shape[0] for o in small.operations if isinstance(o, Conv)]
        assert sorted(rows) == [3, 3, 3, 4]


def test_channels_of_keys_and_values_are_removed() -> None:
    _, _, attention = attend({"k": [1], "v": [4], "out": [5]})
    assert attention is not None
    # A constant key adds the same to all scores of a token; constant values are moved behind the attention.
    assert (attention.sizes, attention.value_sizes) == ((2, 3), (3, 1))


def test_queries_that_are_zero_and_heads_without_keys() -> None:
    _, _, attention = attend({"k": [0, 1, 2]})
    assert attention is not None
    assert (attention.sizes, attention.value_sizes) == ((0, 3), (3, 3))
    _, _, attention = attend({"k": [0, 1, 2, 3, 4, 5]})
    assert attention is not None
    assert attention.sizes == (1, 0)  # tensors need a channel
    assert attention.value_sizes == (3, 3)


def test_attention_to_constants_disappears() -> None:
    with pytest.raises(WiringError, match="no path of edges leads from the input"):
        attend({"v": [0, 1, 2, 3, 4, 5]})


@pytest.mark.parametrize("centered", [True, False])
def test_norms_with_dead_channels(centered: bool) -> None:
    torch.manual_seed(0)
    weight, out = torch.randn(6, 4).double(), torch.randn(3, 6).double()
    weight[[1, 4]] = 0
    out[:, [0, 4]] = 0
    norm = ChannelNorm("n", ("h",), torch.randn(6).double(), torch.randn(6).double(), 1e-3, centered, 6)
    program = Program({"x": (4, 5)}, [projection("h", "x", weight), norm, projection("y", "n", out)], ("y",))
    small = shrink(program)
    x = torch.randn(3, 4, 5).double()
    torch.testing.assert_close(small.run(x)[0], program.run(x)[0])
    (made,) = (o for o in small.operations if isinstance(o, ChannelNorm))
    # Channel 1 is zero before the norm, but after a layer norm it varies as the mean does.
    assert (len(made.scale), made.features) == (5 if centered else 4, 6)


def test_constant_columns_of_an_embedding() -> None:
    torch.manual_seed(0)
    table = torch.randn(9, 5).double()
    table[:, 1], table[:, 3] = 0, 0.5
    operations = [Embedding("e", ("ids",), table), projection("y", "e", torch.randn(4, 5).double())]
    program = Program({"ids": (6,)}, operations, ("y",), {"types": {"ids": "torch.int64"}})
    small, ids = shrink(program), torch.randint(9, (2, 6))
    torch.testing.assert_close(small.run(ids)[0], program.run(ids)[0])
    (made,) = (o for o in small.operations if isinstance(o, Embedding))
    assert made.weight.shape == (9, 3)


# ---- files ----------------------------------------------------------------------------------------------------------

IDS = {"types": {"ids": "torch.int64"}}
ATTENTION = Attention("y", ("x", "x", "x"), None, (2, 2), (2, 2))
NORM = ChannelNorm("y", ("x",), torch.ones(4), torch.ones(4), 1e-5, True, 4)
ARRANGE = Arrange("y", ("x",), ((2, 2), (5,)), (0, 3, 1, 2), (-1, 5, 4))


@pytest.mark.parametrize(
    ("operation", "changes"),
    [
        (ATTENTION, {"sizes": (2, 3)}),
        (ATTENTION, {"sizes": (2,)}),
        (ATTENTION, {"sizes": (5, -1), "value_sizes": (2, 2)}),
        (ATTENTION, {"sizes": (), "value_sizes": ()}),
        (ATTENTION, {"value_sizes": (1, 2)}),
        (ATTENTION, {"sharing": 0}),
        (ATTENTION, {"sharing": 2}),
        (ATTENTION, {"inputs": ("x", "x")}),
        (ATTENTION, {"inputs": ("x",) * 5}),
        (ATTENTION, {"inputs": ("x",) * 4}),
        (ATTENTION, {"mask": torch.zeros(5, 5)}),
        (ATTENTION, {"mask": torch.zeros(3, 5, 5)}),
        (ATTENTION, {"mask": torch.zeros(1, 5, 4)}),
        (ATTENTION, {"mask": torch.zeros(1, 5, 5, dtype=torch.int64)}),
        (NORM, {"features": 3}),
        (NORM, {"features": 0}),
        (NORM, {"epsilon": -1.0}),
        (NORM, {"scale": torch.ones(3)}),
        (NORM, {"shift": torch.ones(4, 1)}),
        (ARRANGE, {"factors": ((2, 3), (5,))}),
        (ARRANGE, {"factors": ((4,), (5,))}),
        (ARRANGE, {"order": (0, 3, 1, 1)}),
        (ARRANGE, {"order": (0, 3, 1)}),
        (ARRANGE, {"shape": (5, 4)}),
        (ARRANGE, {"shape": (-1, -1, 4)}),
        (ARRANGE, {"shape": (-1, -2, 4)}),
        (ARRANGE, {"shape": (-1, 5, 3)}),
        (MultiplyMap("y", ("x",), torch.ones(4, 5)), {"map": torch.ones(4, 6)}),
        (MultiplyMap("y", ("x",), torch.ones(4, 5)), {"map": torch.ones(2, 4, 5)}),
        (Embedding("y", ("ids",), torch.ones(4, 5)), {"weight": torch.ones(4)}),
        (Embedding("y", ("ids",), torch.ones(4, 5)), {"weight": torch.ones(4, 5, dtype=torch.int64)}),
        (Embedding("y", ("ids",), torch.ones(4, 5)), {"inputs": ("x",)}),
    ],
)
def test_invalid_fields_are_rejected(operation: Operation, changes: dict[str, Any], tmp_path: Path) -> None:
    inputs = {"x": (4, 5), "ids": (5,)}
    keep = Arrange("z", ("x",), ((4,), (5,)), (0, 1, 2), (-1, 4, 5))
    check_program(Program(inputs, [operation, keep], ("y", "z"), dict(IDS)), 1e6)
    wrong = dataclasses.replace(operation, **changes)
    with pytest.raises(WiringError):
        check_program(Program(inputs, [wrong, keep], ("y", "z"), dict(IDS)), 1e6)


# ---- traced ---------------------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """A small decoder with an encoder: `nn.Transformer` over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
        self.inner = nn.Transformer(8, 2, 1, 1, 12, batch_first=True, activation="gelu")

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        made = self.inner(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(made)  # type: ignore[no-any-return]


def test_a_traced_transformer_is_saved_and_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = Decoder().eval()
    with torch.no_grad():
        model.inner.encoder.layers[0].linear1.weight[:5] = 0
        model.inner.decoder.layers[0].linear2.weight[:, 3:] = 0
    small = compact(model, (torch.randint(13, (1, 7)), torch.randint(13, (1, 5))))
    assert small.report is not None
    assert small.report.after.parameters < small.report.before.parameters
    assert small.report.after.mult_adds < small.report.before.mult_adds
    given = torch.randint(13, (3, 7)), torch.randint(13, (3, 5))
    with torch.no_grad():
        expected = model(*given)
    torch.testing.assert_close(small(*given), expected)
    again = load_compact(small.save(tmp_path / "model.safetensors"))
    assert torch.equal(again(*given), small(*given))
    assert small.save(tmp_path / "model.onnx").exists()  # compares the outputs


class Windows(nn.Module):
    """A convolution after attention over the pixels, whose results are views."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.norm(F.pad(self.into(x), (0, 0, 0, 0)).flatten(0, 1)).view(b, t, c)
        return self.out(y.mT.reshape(b, c, 3, t // 3))  # type: ignore[no-any-return]


def test_norms_and_convolutions_of_views() -> None:
    torch.manual_seed(0)
    model = Windows().eval()
    model.norm.running_mean.normal_()
    small = compact(model, torch.randn(1, 12, 6))
    x = torch.randn(3, 12, 6)
    torch.testing.assert_close(small(x), model(x).detach(), rtol=1e-5, atol=1e-6)
    assert not any(isinstance(o, TorchOperator) for o in small.program.operations)
    assert small.report is not None
    assert small.report.before.mult_adds == 12 * (36 + 9 * 24)
    assert small.report.uncounted == ()


def test_products_on_pytorch_are_named_in_the_report() -> None:
    small = compact(nn.LSTM(2, 3), torch.randn(1, 4, 2))  # the first dimension is time
    assert small.report is not None
    assert small.report.uncounted == ("aten::lstm.input × 1",)
    assert "not counted, since PyTorch runs them: aten::lstm.input × 1" in str(small.report)
    x = torch.randn(2, 4, 2)
    found, (hidden, cell) = small(x)
    assert (found.shape, hidden.shape, cell.shape) == ((2, 4, 3), (1, 4, 3), (1, 4, 3))


class Tied(nn.Module):
    """An output layer that is the embedding, after a norm whose scale and shift could be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(0.5 * self.norm(self.embed(ids)))  # type: ignore[no-any-return]


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = compact(Tied().eval(), torch.randint(50, (1, 6)))
    assert small.report is not None
    assert small.report.after.parameters == small.report.before.parameters == 50 * 8 + 16
    path = small.save(tmp_path / "model.safetensors")
    assert sum(x.numel() >= 400 for x in load_file(path).values()) == 1
    ids = torch.randint(50, (3, 6))
    assert torch.equal(load_compact(path)(ids), small(ids))


def test_masks_of_few_numbers_are_stored_once(tmp_path: Path) -> None:
    """As of a table of relative positions: every head and layer has 20 × 20 entries, but 39 numbers."""
    torch.manual_seed(0)
    tokens = torch.arange(20)
    mask = torch.randn(2, 39)[:, tokens[:, None] - tokens + 19]
    operations = [Attention(f"y{i}", ("x",) * 3, mask.clone(), (2, 2), (2, 2)) for i in range(3)]
    program = Program({"x": (4, 20)}, operations, ("y0", "y1", "y2"))
    assert program_size(program).parameters == 2 * 39
    program.save(tmp_path / "model.safetensors")
    again = Program.load(tmp_path / "model.safetensors")
    for o in again.operations:
        assert torch.equal(o.tensors()["mask"], mask)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(x.shape) for name, x in stored.items() if name.endswith("table")} == {"y0.mask.table": (2, 39)}
    assert sum(x.numel() * x.element_size() for x in stored.values()) == 78 * 4 + 400
