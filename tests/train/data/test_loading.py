"""Loading data sets by name: the registry, common options, the embedded digits and synthetic data."""

import numpy as np
import pytest
import torch
from torch import nn

from wirings.errors import WiringError
from wirings.train.data import (
    Data,
    ImageDataset,
    LoadOptions,
    base,
    digits,
    get,
    load,
    names,
    register_dataset,
    synthetic,
)
from wirings.train.data.sampling import hold_out, rank_slice


def first(data: Data, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return next(iter(data.train.epoch(number)))


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_registry", dict(base._registry))


def test_names() -> None:
    assert {"cifar10", "digits", "folder", "imagenet", "shards", "synthetic"} <= set(names())
    with pytest.raises(WiringError, match=r"unknown data set 'cifar'. Did you mean 'cifar10'"):
        load("cifar")


@pytest.mark.usefixtures("_own_registry")
def test_rejects_unknown_options_of_a_data_set() -> None:
    @register_dataset("mine")
    class Mine(ImageDataset):
        def load(self, options: LoadOptions, *, colour: str = "red") -> Data:
            small = load("synthetic", batch=options.batch, examples=4)
            return Data(colour, 10, small.shape, small.train, small.test)

    assert "mine" in names()
    assert (get("mine").name, get("mine").title) == ("mine", "mine")
    assert load("mine", batch=2, colour="blue").name == "blue"
    with pytest.raises(WiringError, match=r"unknown option of data set 'mine': 'color'. Did you mean 'colour'"):
        load("mine", color="blue")

    @register_dataset("bare")
    class Bare(ImageDataset):
        def load(self, options: LoadOptions) -> Data:
            return load("synthetic", batch=options.batch)

    with pytest.raises(WiringError, match="has no options of its own, got 'colour'"):
        load("bare", colour="blue")


@pytest.mark.usefixtures("_own_registry")
def test_registering_checks_the_class_and_the_name() -> None:
    with pytest.raises(WiringError, match="expects a subclass of Dataset"):
        register_dataset("mine")(dict)  # type: ignore[type-var]
    with pytest.raises(WiringError, match="a data set named 'digits' is registered already"):
        register_dataset("digits")(synthetic.Synthetic)
    assert register_dataset("digits")(digits.Digits) is digits.Digits, "the same class again, as in a notebook"


def test_every_option_changes_something() -> None:
    plain = first(load("digits", augment=False))
    assert not torch.equal(plain[1], first(load("digits", augment=False, seed=1))[1])
    augmented = first(load("digits"))
    assert torch.equal(plain[1], augmented[1])
    assert not torch.equal(plain[0], augmented[0])
    assert torch.equal(first(load("digits", augment=False, rank=1, world=2))[0], plain[0][256:])
    assert len(first(load("digits", batch=10))[0]) == 10
    assert first(load("digits", device="meta"))[0].device.type == "meta"
    assert load("synthetic", image_size=12).shape == (3, 12, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"directory": "here"}, "reads no files"),
        ({"image_size": 16}, "have 8 × 8 pixels, got image_size = 16"),
        ({"image_size": 0}, "image_size must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"workers": -1}, "workers must be an integer of at least 0, got -1"),
        ({"batch": 5, "world": 2}, "multiple of the number of ranks"),
        ({"classes": 5}, "unknown option of data set 'digits': 'classes'"),
    ],
)
def test_rejects_bad_options(settings: dict[str, object], message: str) -> None:
    with pytest.raises(WiringError, match=message):
        load("digits", **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_rejects_a_missing_device() -> None:
    with pytest.raises(WiringError, match="finds no CUDA device"):
        load("digits", device="cuda")


def test_rank_slice() -> None:
    assert [list(rank_slice(7, rank, 3)) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]


def test_digits_are_split_as_in_the_demo() -> None:
    images, labels = digits.load()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    data = load("digits", augment=False)
    (x, y), *_ = data.test.epoch(0)
    assert (data.train.examples, data.test.examples, len(y)) == (1400, 397, 397)
    assert torch.equal(y, labels[order[1400:]])
    assert torch.allclose(x * 0.376 + 0.305, images[order[1400:]], atol=1e-6)
    seen = torch.cat([x for x, _ in data.train.epoch(0)])
    assert abs(seen.mean()) < 0.01
    assert abs(seen.std() - 1) < 0.01


def test_synthetic_options() -> None:
    data = load("synthetic", examples=30, test_examples=7, classes=3, shape=(2, 5, 4), batch=30)
    assert (data.classes, data.shape, data.train.examples, data.test.examples) == (3, (2, 5, 4), 30, 7)
    assert torch.bincount(first(data)[1]).tolist() == [10, 10, 10]
    assert load("synthetic", examples=30).test.examples == 7
    assert not torch.equal(*(next(load("synthetic", seed=s).test.epoch(0))[0] for s in (0, 1)))
    with pytest.raises(WiringError, match="got shape"):
        load("synthetic", shape=(3, 32))
    with pytest.raises(WiringError, match="classes = 0"):
        load("synthetic", classes=0)


def test_repeated_synthetic_examples_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "MAX_BYTES", 300)
    data = load("synthetic", examples=1_000_000, shape=(1, 10, 10), batch=512, augment=False)
    assert (len(data.train), data.train.examples) == (1954, 1_000_000)
    assert len(first(data)[0].unique(dim=0)) == 3


def test_synthetic_data_can_be_learned() -> None:
    data = load("synthetic", examples=1000, shape=(1, 8, 8), batch=100, augment=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(5):
        for x, y in data.train.epoch(number):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in data.test.epoch(0))
    assert right / data.test.examples > 0.9


def test_holdout_consists_of_training_images_only() -> None:
    whole, part = load("digits", augment=False), load("digits", holdout=203)
    images, labels = digits.load()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    (x, y), *_ = part.test.epoch(0)
    assert (part.train.examples, part.test.examples, len(y)) == (1197, 203, 203)
    assert torch.bincount(y).tolist() == [21, 21, 21, *[20] * 7]
    held = {image.numpy().tobytes() for image in x}
    rest = {
        image.numpy().tobytes() for x, _ in load("digits", holdout=203, augment=False).train.epoch(0) for image in x
    }
    before = {image.numpy().tobytes() for x, _ in whole.train.epoch(0) for image in x}
    assert held | rest == before, "no test image, and none that is augmented"
    assert not held & rest
    (again, _), *_ = load("digits", holdout=203, seed=5, rank=1, world=2, batch=512).test.epoch(0)
    assert torch.equal(again, x[102:]), "it does not depend on the seed"
    assert not torch.equal(next(part.test.epoch(0))[1][:20], labels[order[1400:1420]])
    assert len(images) == 1797


def test_hold_out() -> None:
    labels = np.array([3, 1, 3, 1, 3, 1, 3])
    train, held = hold_out(labels, 3)
    assert sorted([*train, *held]) == list(range(7))
    assert sorted(labels[held]) == [1, 1, 3], "the first class gives one image more"
    assert np.array_equal(hold_out(labels, 3)[1], held)
    for count, message in [
        (1, "at least 2 .one image for each class., got 1"),
        (True, "got True"),
        ("many", "got 'many'"),
        (5, "holdout = 5 takes 3 images of class 1, which has only 3"),
    ]:
        with pytest.raises(WiringError, match=message):
            hold_out(labels, count)
