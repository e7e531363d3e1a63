"""The vision transformer: what is wired, what its options change, and mistakes."""

from typing import Any

import pytest
import torch

from wirings import WiringError, models

SMALL: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "image_size": 8}


def test_the_linear_layers_of_the_blocks_are_wired() -> None:
    model: Any = models.get("vit", rule="dnw", density=0.25, **SMALL)
    names = [report.name for report in model.wiring.look()]
    assert names == [f"blocks.{i}.{layer}.weight" for i in range(2) for layer in ("qkv", "out", "up", "down")]
    assert sum(report.edges for report in model.wiring.look()) == 2 * 12 * 16 * 16 // 4


@pytest.mark.parametrize("pool", ["mean", "class"])
def test_a_vit_sees_where_its_patches_are(pool: str) -> None:
    torch.manual_seed(0)
    model = models.get("vit", pool=pool, **SMALL).eval()
    images = torch.randn(2, 3, 8, 8)
    assert model(images).shape == (2, 10)
    swapped = images.roll(4, -1)  # the same two columns of patches, at other places
    assert not torch.allclose(model(images), model(swapped))
    with torch.no_grad():
        model.positions.zero_()
    torch.testing.assert_close(model(images), model(swapped))


def test_stochastic_depth_skips_branches_while_training_only() -> None:
    torch.manual_seed(0)
    model = models.get("vit", drop_path=0.5, **SMALL)
    assert [block.drop_path for block in model.blocks] == [0.0, 0.5]
    x = torch.randn(64, 4, 16)
    block = model.blocks[1]
    same = (block(x) == x).all((1, 2)).sum()
    assert 4 <= same <= 28  # a quarter skips both branches
    block.eval()
    assert not (block(x) == x).all((1, 2)).any()
    kept = torch.cat([block.train()._branch(torch.ones(64, 1, 1)) for _ in range(50)])
    assert set(kept.unique().tolist()) == {0.0, 2.0}


def test_dropout_is_used() -> None:
    model = models.get("vit", dropout=0.5, **SMALL)
    images = torch.randn(2, 3, 8, 8)
    assert not torch.equal(model(images), model(images))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 30}, "image_size must be a multiple of patch, got 30 and 4"),
        ({"heads": 3}, "vit: width must be a multiple of heads, got width = 16 and heads = 3"),
        ({"heads": 0}, "vit: heads must be a whole number, at least 1, got 0"),
        ({"layers": -1}, "vit: layers must be a whole number, at least 1, got -1"),
        ({"patch": 0}, "vit: patch must be a whole number, at least 1, got 0"),
        ({"mlp": 0.0}, "vit: the size of the MLP's hidden layer must be a whole number, at least 1, got 0"),
        ({"dropout": 2}, "vit: dropout must be a number of at least 0 and below 1, got 2"),
        ({"drop_path": 1.0}, "vit: drop_path must be a number of at least 0 and below 1, got 1.0"),
        ({"pool": "max"}, "pool must be 'mean' or 'class', got 'max'"),
    ],
)
def test_rejects_sizes_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WiringError, match=message):
        models.get("vit", **{**SMALL, **options})


def test_rejects_images_of_another_size() -> None:
    with pytest.raises(WiringError, match=r"expected images \(batch, 3, 8, 8\), got \(1, 3, 12, 12\)"):
        models.get("vit", **SMALL)(torch.zeros(1, 3, 12, 12))
