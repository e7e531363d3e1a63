"""The GPT: what it sees, how it starts, which weights are wired."""

import math

import pytest
import torch

import wirings
from wirings import WiringError, models
from wirings.models import GPT
from wirings.profiling import profile

SMALL = {"layers": 2, "heads": 2, "width": 32, "context": 12, "classes": 20}


def test_a_token_sees_only_itself_and_those_before() -> None:
    torch.manual_seed(0)
    model = models.get("gpt", **SMALL).eval()
    tokens = torch.randint(20, (3, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 20
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 12, 20)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()
    torch.testing.assert_close(model(tokens[:, :5]), before[:, :5])


def test_starts_as_gpt_2() -> None:
    torch.manual_seed(0)
    model = GPT(500, 128, layers=4, heads=4, width=256, bias=True)
    block = model.blocks[1]
    for weight in (block.attention.query.weight, block.up.weight, model.tokens.weight, model.positions.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    for weight in (block.attention.out.weight, block.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.02)
    assert all(not parameter.any() for name, parameter in model.named_parameters() if name.endswith("bias"))
    loss = torch.nn.functional.cross_entropy(model(torch.randint(500, (4, 128))).flatten(0, 1), torch.arange(512) % 500)
    assert loss.item() == pytest.approx(math.log(500), abs=0.1), "all tokens are equally likely at first"


def test_sizes_and_options() -> None:
    nano = models.get("gpt", classes=65)
    assert sum(p.numel() for p in nano.parameters()) - nano.positions.weight.numel() == 10_646_784, "10.65M, as nanoGPT"
    assert nano.head.weight is nano.tokens.weight
    untied = models.get("gpt", **SMALL, tied=False, bias=True)
    assert untied.head.weight is not untied.tokens.weight
    assert untied.head.bias is None
    assert untied.blocks[0].up.bias is not None
    torch.manual_seed(0)
    dropping = models.get("gpt", **SMALL, dropout=0.5)
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    assert not torch.equal(dropping(tokens), dropping(tokens))
    dropping.eval()
    assert torch.equal(dropping(tokens), dropping(tokens))


@pytest.mark.parametrize("tied", [True, False])
def test_wires_the_layers_of_blocks(tied: bool) -> None:
    model = models.get("gpt", rule="dnw", density=0.25, **SMALL, tied=tied)
    reports = model.wiring.look()
    layers = ("attention.query", "attention.key", "attention.value", "attention.out", "up", "down")
    assert [report.name for report in reports] == [f"blocks.{i}.{layer}.weight" for i in range(2) for layer in layers]
    assert sum(report.possible for report in reports) == 2 * 12 * 32**2
    assert sum(report.edges for report in reports) == 2 * 12 * 32**2 // 4
    counted = profile(model)
    assert counted.params == 2 * 3 * 32**2 + 5 * 32 + 12 * 32 + (1 if tied else 2) * 20 * 32
    model.eval()
    tokens = torch.arange(12)[None]
    before = model(tokens)
    wirings.finalize_(model)
    torch.testing.assert_close(model(tokens), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 30, "heads": 4}, r"gpt: width must be a multiple of heads, got width = 30 and heads = 4\."),
        ({"layers": 0}, r"gpt: layers must be a whole number, at least 1, got 0\."),
        ({"context": 2.5}, r"gpt: context must be a whole number, at least 1, got 2\.5\."),
        ({"dropout": 1.0}, r"gpt: dropout must be a number of at least 0 and below 1, got 1\.0\."),
    ],
)
def test_rejects_invalid_sizes(options: dict[str, float], message: str) -> None:
    with pytest.raises(WiringError, match=message):
        models.get("gpt", **{**SMALL, **options})


def test_rejects_more_tokens_than_its_context() -> None:
    with pytest.raises(WiringError, match=r"gpt was made for 12 tokens, got 13\."):
        models.get("gpt", **SMALL)(torch.zeros(1, 13, dtype=torch.int64))
