"""The contract of every registered data set of images, so that registering one is enough to have it tested."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.train.data import Data, ImageDataset, Loader, get, load, names

pytest.importorskip("PIL.Image")
EVERY = pytest.mark.parametrize("name", [name for name in names() if isinstance(get(name), ImageDataset)])


@pytest.fixture
def sample(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments for `load` that load a sample of the data set."""
    monkeypatch.setenv("WIRINGS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "sample"
    folder.mkdir()
    return {"batch": 4, **get(name).write_sample(folder)}


def concatenated(loader: Loader, epoch: int = 0, start: int = 0) -> tuple[Tensor, Tensor]:
    images, labels = zip(*loader.epoch(epoch, start), strict=True)
    return torch.cat(images), torch.cat(labels)


def loaders(data: Data) -> tuple[Loader, Loader]:
    return data.train, data.test


@EVERY
def test_facts_agree_with_the_data(name: str, sample: dict[str, Any]) -> None:
    dataset, data = get(name), load(name, **sample)
    assert data.name == dataset.name == name
    assert dataset.title
    assert dataset.classes in (None, data.classes)
    if dataset.class_names is not None:
        assert len(dataset.class_names) == data.classes
    if dataset.image_size is not None:
        assert data.shape[1:] == (dataset.image_size, dataset.image_size)
    assert len(dataset.mean) == len(dataset.std) == data.shape[0]


@EVERY
def test_batches_have_the_right_types_and_shapes(name: str, sample: dict[str, Any]) -> None:
    data = load(name, **sample)
    for loader in loaders(data):
        batches = list(loader.epoch(0))
        assert [len(y) for _, y in batches] == loader.sizes()
        assert len(batches) == len(loader)
        assert sum(len(y) for _, y in batches) == loader.examples
        for x, y in batches:
            assert (x.shape, x.dtype) == ((len(y), *data.shape), torch.float32)
            assert y.dtype == torch.int64
            assert x.isfinite().all()
            assert ((y >= 0) & (y < data.classes)).all()


@EVERY
def test_batches_depend_on_seed_epoch_and_start_alone(name: str, sample: dict[str, Any]) -> None:
    first = load(name, **sample)
    x, y = concatenated(first.train, 1)
    before = torch.get_rng_state()
    again = load(name, **sample).train
    torch.manual_seed(3)
    for start in (0, 1, len(again)):
        rest = list(again.epoch(1, start))
        assert len(rest) == len(again) - start
        if rest:
            done = sum(again.sizes()[:start])
            assert torch.equal(torch.cat([images for images, _ in rest]), x[done:])
            assert torch.equal(torch.cat([labels for _, labels in rest]), y[done:])
    torch.set_rng_state(before)
    list(again.epoch(0))
    assert torch.equal(torch.get_rng_state(), before), "the global generator must not be used"
    other = load(name, **{**sample, "seed": 1}).train
    assert not torch.equal(concatenated(other, 1)[0], x)
    assert not torch.equal(concatenated(again, 2)[0], x)


@EVERY
def test_test_images_are_the_same_in_every_epoch(name: str, sample: dict[str, Any]) -> None:
    test = load(name, **sample).test
    for one, other in zip(concatenated(test, 0), concatenated(test, 1), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(concatenated(load(name, **{**sample, "augment": False}).test)[0], concatenated(test)[0])


@EVERY
def test_ranks_share_the_examples(name: str, sample: dict[str, Any]) -> None:
    alone = load(name, **sample)
    ranks = [load(name, **{**sample, "rank": rank, "world": 2}) for rank in range(2)]
    for which, loader in enumerate(loaders(alone)):
        parts = [loaders(rank)[which] for rank in ranks]
        assert {part.examples for part in parts} == {loader.examples}
        seen = torch.cat([concatenated(part)[1] for part in parts])
        assert torch.equal(seen.sort().values, concatenated(loader)[1].sort().values)


@EVERY
def test_prepares_an_image_as_a_test_image(name: str, sample: dict[str, Any]) -> None:
    from PIL import Image

    dataset, data = get(name), load(name, **sample)
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (dataset.mean, dataset.std))
    expected = concatenated(data.test)[0][0]
    pixels = ((expected * std + mean) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    image = Image.fromarray(pixels if pixels.shape[-1] > 1 else pixels[..., 0]).convert("RGB")
    torch.testing.assert_close(dataset.prepare_image(image, sample.get("image_size")), expected)
    large = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8))
    prepared = dataset.prepare_image(large, sample.get("image_size"))
    assert (prepared.shape, prepared.dtype) == (data.shape, torch.float32)


@EVERY
def test_rejects_what_it_does_not_support(name: str, sample: dict[str, Any], tmp_path: Path) -> None:
    dataset = get(name)
    if not dataset.reads_files:
        with pytest.raises(WiringError, match="reads no files"):
            load(name, **{**sample, "directory": tmp_path})
    if dataset.image_size is not None:
        with pytest.raises(WiringError, match="image_size = 999"):
            load(name, **{**sample, "image_size": 999})
    if not dataset.can_fetch:
        with pytest.raises(WiringError, match="cannot be fetched"):
            dataset.fetch()
    with pytest.raises(WiringError, match="colour_space"):
        load(name, **sample, colour_space="lab")
