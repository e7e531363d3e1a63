"""Folders of images: classes, crops, ranks, workers and corrupt files."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wirings.errors import WiringError
from wirings.train.data import ImageNet, get
from wirings.train.data import folder as folder_data
from wirings.train.data.augment import (
    FORMATS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    centre_crop,
    crop_box,
    random_resized_crop,
    read_image,
)
from wirings.train.data.base import Data, load
from wirings.train.data.sampling import random_stream


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (24, 20)) -> None:
    """Write an image of one colour, with a gradient from left to right in the blue channel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((size[1], size[0], 3), colour, dtype=np.uint8)
    pixels[:, :, 2] = np.linspace(0, 255, size[0])
    Image.fromarray(pixels).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, label in enumerate(("ant", "bee", "cow")):
        for which in range(4):
            picture(tmp_path / "train" / label / f"{which}.png", (80 * number, 20 * which, 0))
        picture(tmp_path / "val" / label / "a.JPG", (80 * number, 0, 0), (40, 30))
    return tmp_path


def data(root: Path, name: str = "folder", **settings: object) -> Data:
    return load(name, **{"directory": root, "batch": 5, "workers": 0, "image_size": 8, **settings})


def whole(batches: object) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def pixels(x: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation, to pixels from 0 to 255."""
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    return (x * std + mean) * 255


def test_loads_classes_and_images(root: Path) -> None:
    d = data(root)
    assert (d.name, d.classes, d.shape, d.md5) == ("folder", 3, (3, 8, 8), None)
    assert (d.train.examples, len(d.train), d.train.sizes(), d.test.examples) == (12, 3, [5, 5, 2], 3)
    x, y = whole(d.train.epoch(0))
    assert (x.shape, x.dtype, y.dtype) == ((12, 3, 8, 8), torch.float32, torch.int64)
    assert torch.bincount(y).tolist() == [4, 4, 4]
    assert torch.allclose(
        pixels(x)[:, 0], (80.0 * y).view(-1, 1, 1).expand(-1, 8, 8), atol=1e-3
    )  # red encodes the class
    assert whole(d.test.epoch(0))[1].tolist() == [0, 1, 2]
    assert load("folder", directory=root, workers=0).shape == (3, 224, 224)


def test_test_images_are_resized_and_centre_cropped(root: Path) -> None:
    x, _ = whole(data(root, image_size=14).test.epoch(0))
    with Image.open(root / "val" / "bee" / "a.JPG") as image:
        expected = image.resize((21, 16), Image.Resampling.BILINEAR).crop((3, 1, 17, 15))  # 14 * 256 / 224 = 16
    assert torch.allclose(pixels(x)[1].permute(1, 2, 0), torch.from_numpy(np.array(expected)).float(), atol=1e-3)


def test_every_option_changes_something(root: Path) -> None:
    x, y = whole(data(root).train.epoch(0))
    assert not torch.equal(x, whole(data(root).train.epoch(1))[0])
    assert not torch.equal(x, whole(data(root, seed=1).train.epoch(0))[0])
    plain, same = whole(data(root, augment=False).train.epoch(0))
    assert torch.equal(y, same)
    assert not torch.equal(x, plain)
    assert len(plain[:, 2].unique(dim=0)) == 1  # never flipped
    assert data(root, image_size=16).shape == (3, 16, 16)


def test_batches_depend_on_seed_epoch_and_start_alone(root: Path) -> None:
    first = list(data(root).train.epoch(2))
    before = torch.get_rng_state()
    for start in (0, 1, 3):
        for workers in (0, 2):
            rest = list(data(root, workers=workers).train.epoch(2, start))
            assert len(rest) == 3 - start
            for one, other in zip(first[start:], rest, strict=True):
                assert all(map(torch.equal, one, other))
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(WiringError, match="got epoch 0 and batch 4"):
        data(root).train.epoch(0, 4)


def test_two_epochs_can_be_read_at_once(root: Path) -> None:
    d = data(root)
    together = list(zip(d.train.epoch(0), d.train.epoch(1), strict=True))
    assert all(map(torch.equal, whole(a for a, _ in together), whole(d.train.epoch(0))))


@pytest.mark.parametrize("world", [2, 5])
def test_ranks_together_see_what_one_process_sees(root: Path, world: int) -> None:
    alone = data(root, batch=10).train.epoch(0)
    ranks = zip(*(data(root, batch=10, rank=rank, world=world).train.epoch(0) for rank in range(world)), strict=True)
    for (x, y), parts in zip(alone, ranks, strict=True):
        assert torch.equal(x, torch.cat([part[0] for part in parts]))
        assert torch.equal(y, torch.cat([part[1] for part in parts]))


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images_raise_or_are_skipped(root: Path, workers: int) -> None:
    broken = root / "train" / "bee" / "2.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(WiringError, match=r"^\S+bee/2.png cannot be decoded .*skip_corrupt=True"):
        list(data(root, workers=workers).train.epoch(0))
    (root / "train" / "ant" / "0.png").write_text("no image")
    d = data(root, workers=workers, skip_corrupt=True)
    for _ in range(2):
        assert sorted(whole(d.train.epoch(0))[1].tolist()) == [0] * 3 + [1] * 3 + [2] * 4
    assert sorted(d.train.skipped) == [str(root / "train" / "ant" / "0.png"), str(broken)]
    assert d.test.skipped == []


def test_rejects_folders_of_corrupt_images_only(root: Path) -> None:
    for image in root.glob("train/*/*"):
        image.write_text("no image")
    d = data(root, batch=4, skip_corrupt=True)
    with pytest.raises(WiringError, match=r"^none of the 12 images can be decoded, such as \S+png \("):
        list(d.train.epoch(0))
    assert len(whole(d.test.epoch(0))[1]) == 3


def test_very_thin_images_are_corrupt(root: Path) -> None:
    """A row of 60,000 pixels would be enlarged to 13 GB."""
    Image.new("L", (60_000, 1)).save(root / "val" / "bee" / "a.png")
    assert (root / "val" / "bee" / "a.png").stat().st_size < 300
    with pytest.raises(WiringError, match=r"a.png cannot be decoded \(an image of 60,000 × 1 pixels is too thin"):
        whole(data(root, image_size=224).test.epoch(0))
    d = data(root, image_size=224, skip_corrupt=True)
    assert whole(d.test.epoch(0))[1].tolist() == [0, 1, 2]
    assert len(d.test.skipped) == 1
    with pytest.raises(WiringError, match="too thin"):
        centre_crop(Image.new("RGB", (1, 60_000)), 224)
    assert centre_crop(Image.new("RGB", (4, 900)), 224).size == (224, 224)


def test_other_formats_are_refused_whatever_their_name(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow starts Ghostscript for PostScript, by the content of the file."""
    started = tmp_path / "started"
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\n: > {started}\nexit 1\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (root / "val" / "bee" / "a.JPG").write_bytes(postscript)
    with pytest.raises(WiringError, match=r"a.JPG cannot be decoded \(cannot identify image file"):
        whole(data(root).test.epoch(0))
    with pytest.raises(WiringError, match="cannot be read as an image"):
        read_image(root / "val" / "bee" / "a.JPG")
    assert not started.exists(), "Ghostscript was started"


@pytest.mark.parametrize("kind", FORMATS)
def test_all_formats_are_decoded(kind: str, tmp_path: Path) -> None:
    Image.new("RGB", (6, 5), (10, 20, 30)).save(tmp_path / "any.png", kind)
    assert read_image(tmp_path / "any.png").size == (6, 5)


def test_batch_with_corrupt_images_only(root: Path) -> None:
    for label in ("ant", "bee", "cow"):
        (root / "val" / label / "a.JPG").write_text("no image")
    Image.new("RGB", (9, 9)).save(root / "val" / "cow" / "b.png")
    d = data(root, batch=3, skip_corrupt=True)
    (x, y), (_, last) = d.test.epoch(0)
    assert last.tolist() == [2]
    assert (x.shape, y.shape, len(d.test.skipped)) == ((0, 3, 8, 8), (0,), 3)


def test_converts_other_colour_modes(root: Path) -> None:
    for mode in ("L", "RGBA", "P", "CMYK"):
        Image.new(mode, (9, 9)).save(root / "train" / "ant" / f"{mode}.{'jpg' if mode == 'CMYK' else 'png'}")
    (root / "train" / "ant" / "notes.txt").write_text("not an image, so it is ignored")
    assert len(whole(data(root).train.epoch(0))[0]) == 16


def test_accepts_test_instead_of_val(root: Path) -> None:
    (root / "val").rename(root / "test")
    assert data(root).test.examples == 3


def test_rejects_bad_folders(root: Path) -> None:
    with pytest.raises(WiringError, match="needs directory="):
        data(None)
    with pytest.raises(WiringError, match="there is no such folder"):
        data(root / "nowhere")
    with pytest.raises(WiringError, match="must contain the folders train, and val or test; it contains ant, bee, cow"):
        data(root / "train")
    with pytest.raises(WiringError, match=r"ImageNet has 1,000 classes, but .* has 3"):
        data(root, "imagenet")
    picture(root / "val" / "dog" / "a.png", (0, 0, 0))
    with pytest.raises(WiringError, match=r"val has 1 classes that \S+train lacks: dog"):
        data(root)
    (root / "train" / "dog").mkdir()
    with pytest.raises(WiringError, match=r"train/dog must contain images .*; it is empty"):
        data(root)
    (root / "val" / "dog").rename(root / "dog")
    with pytest.raises(WiringError, match=r"train has 1 classes that \S+val lacks: dog"):
        data(root)


def test_rejects_images_outside_class_folders(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "a.png", (0, 0, 0))
    (tmp_path / "val").mkdir()
    with pytest.raises(WiringError, match=r"must contain a folder of images for each class; it contains a.png"):
        data(tmp_path)


def test_imagenet_loads_class_folders(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageNet, "classes", 3)
    assert data(root, "imagenet").name == "imagenet"


def test_random_crops_have_the_right_area_and_ratio() -> None:
    full, boxes = (400, 300), []
    for number in range(2000):
        boxes.append(crop_box(full, random_stream(0, 0, 1, number), (0.08, 1.0), (3 / 4, 4 / 3)))
    left, top, width, height = np.array(boxes).T
    area, ratio = width * height / (400 * 300), width / height
    assert (left >= 0).all()
    assert (left + width <= 400).all()
    assert (top >= 0).all()
    assert (top + height <= 300).all()
    assert area.min() > 0.07
    assert area.max() <= 1
    assert ratio.min() > 0.74
    assert ratio.max() < 1.35
    # Small areas always fit, so among them the area and the logarithm of the ratio are uniform, as drawn.
    small = area < 0.4
    assert abs(area[small].mean() - 0.24) < 0.02
    assert abs(np.log(ratio[small]).mean()) < 0.02


def test_crop_falls_back_to_the_centre() -> None:
    assert crop_box((1000, 10), random_stream(0, 0), (0.9, 1.0), (3 / 4, 4 / 3)) == (493, 0, 13, 10)
    assert crop_box((10, 1000), random_stream(0, 0), (0.9, 1.0), (3 / 4, 4 / 3)) == (0, 493, 10, 13)


def test_half_the_crops_are_flipped() -> None:
    image = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8)[None, :, None], (64, 1, 3)))
    rows = [np.array(random_resized_crop(image, 8, random_stream(0, 0, 1, number)))[0, :, 0] for number in range(400)]
    assert 160 < sum(int(row[0]) > int(row[-1]) for row in rows) < 240


def test_centre_crop_of_extreme_sizes() -> None:
    assert centre_crop(Image.new("RGB", (3, 1000)), 8).size == (8, 8)
    assert centre_crop(Image.new("RGB", (1, 1)), 8).size == (8, 8)
    assert centre_crop(Image.new("RGB", (500, 2)), 1).size == (1, 1)


def test_missing_pillow_is_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(WiringError, match="needs Pillow, which is not installed"):
        data(root)


@pytest.mark.gpu
def test_gpu_matches_cpu(root: Path) -> None:
    x, y = whole(data(root, workers=2).train.epoch(0))
    x2, y2 = whole(data(root, workers=2, device="cuda").train.epoch(0))
    assert x2.is_cuda
    assert torch.allclose(x, x2.cpu(), atol=1e-5)
    assert torch.equal(y, y2.cpu())


def test_small_images_are_padded_and_kept_on_the_device(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images = random.integers(1, 256, (2, 2, 3, 8, 8, 3), dtype=np.uint8)  # split, class, number, …
    for split, part in enumerate(("train", "test")):
        for label in range(2):
            for number in range(3):
                folder = tmp_path / part / f"class{label}"
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(images[split, label, number]).save(folder / f"{number}.png")
    settings = {"crop": "padded", "padding": 2, "mean": (0.5, 0.25, 0.0), "std": (0.5, 0.25, 1.0)}
    kept = data(tmp_path, **settings)
    assert hasattr(kept.train, "begin"), "a captured step fetches its own batches"
    x, y = whole(kept.test.epoch(0))
    back = (x * torch.tensor([0.5, 0.25, 1.0]).view(3, 1, 1) + torch.tensor([0.5, 0.25, 0.0]).view(3, 1, 1)) * 255
    expected = torch.from_numpy(images[1].reshape(6, 8, 8, 3)).permute(0, 3, 1, 2)
    assert torch.allclose(back, expected.float(), atol=1e-3), "not resized"
    assert y.tolist() == [0, 0, 0, 1, 1, 1]
    crops = {tuple(one.flatten().tolist()) for epoch in range(30) for one in whole(kept.train.epoch(epoch))[0]}
    assert 100 < len(crops) <= 6 * 25 * 2, "25 places, flipped or not"
    streamed = data(tmp_path, **settings | {"augment": False})
    assert torch.equal(whole(streamed.test.epoch(0))[0], x)


def test_large_folders_are_padded_in_workers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_data, "ON_DEVICE", 10)
    padded = data(root, crop="padded", padding=3)
    assert not hasattr(padded.train, "begin")
    x, y = whole(padded.train.epoch(0))
    red = pixels(x)[:, 0].round()
    assert set(red[y == 1].flatten().tolist()) == {0.0, 80.0}, "the class, and black padding"
    assert torch.equal(whole(padded.train.epoch(0))[0], x)


def test_crops_of_another_scale(root: Path) -> None:
    whole_images = whole(data(root, scale=[1.0, 1.0]).train.epoch(0))[0]
    parts = whole(data(root, scale=[0.05, 0.1]).train.epoch(0))[0]
    spread = [(pixels(x)[:, 2].amax((1, 2)) - pixels(x)[:, 2].amin((1, 2))).mean() for x in (whole_images, parts)]
    assert spread[0] > 2 * spread[1], "the gradient from left to right"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"crop": "cut"}, "unknown data.options.crop 'cut'"),
        ({"padding": -1}, "padding must be an integer from 0 to 1,024, got -1"),
        ({"scale": [0.5, 0.1]}, "scale must be the smallest and the largest area"),
        ({"scale": 0.5}, "scale must be"),
        ({"mean": [0.5, 0.5]}, "mean must be a number for each of three channels"),
        ({"std": [0.5, 0.5, 0.0]}, "std must be"),
        ({"padding": 2}, r"padding changes nothing with data.options.crop = 'resized'.*set data.options.crop=padded"),
        ({"crop": "padded", "scale": [0.5, 1.0]}, r"scale changes nothing with data.options.crop = 'padded'"),
        (
            {"crop": "padded", "image_size": None},
            r"set data.image_size, such as data.image_size=20: .* has 24 × 20 pixels",
        ),
    ],
)
def test_rejects_invalid_options(root: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(WiringError, match=says):
        data(root, **options)


def test_predictions_are_normalised_as_training_was() -> None:
    image = Image.new("RGB", (8, 8), (255, 0, 0))
    options = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    prepared = get("folder").with_options(options).prepare_image(image, 8)
    assert prepared[:, 0, 0].tolist() == [1.0, -1.0, -1.0]
    assert get("folder").mean == IMAGENET_MEAN, "the registered one is unchanged"


def test_predictions_with_padded_crops_are_not_resized(tmp_path: Path) -> None:
    """As in testing: an image of the network's size is taken as it is."""
    values = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    prepared = get("folder").with_options({"crop": "padded"}).prepare_image(Image.fromarray(values), 8)
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(values).save(tmp_path / split / "a" / "0.png")
    assert torch.equal(prepared, whole(data(tmp_path, crop="padded").test.epoch(0))[0][0])


@pytest.mark.parametrize("name", ["folder", "imagenet", "shards"])
def test_predictions_are_cropped_as_in_testing(name: str) -> None:
    """Test images are enlarged before they are cropped, also those of the network's size."""
    values = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    prepared = get(name).prepare_image(Image.fromarray(values), 16)
    expected = torch.from_numpy(np.array(centre_crop(Image.fromarray(values), 16))).permute(2, 0, 1)
    assert torch.allclose(pixels(prepared[None])[0], expected.float(), atol=1e-3)


@pytest.mark.parametrize(
    ("holdout", "train", "test"), [(3, 9, 3), (0.25, 9, 3), (5, 7, 5), (0.5, 6, 6), (0.01, 9, 3), (0.99, 3, 9)]
)
def test_holds_out_training_images_of_every_class(root: Path, holdout: float, train: int, test: int) -> None:
    found = data(root, holdout=holdout, augment=False)
    assert (found.train.examples, found.test.examples) == (train, test)
    assert found.names == ("ant", "bee", "cow")
    assert set(found.test.files).isdisjoint(found.train.files)  # type: ignore[attr-defined]
    assert all("/train/" in path for path in found.test.files)  # type: ignore[attr-defined]
    assert set(found.test.labels) == {0, 1, 2}  # type: ignore[attr-defined]
    again = data(root, holdout=holdout, seed=7)
    assert again.test.files == found.test.files, "the same images for every seed"  # type: ignore[attr-defined]


def test_small_images_are_held_out_on_the_device(root: Path) -> None:
    found = data(root, holdout=3, crop="padded", image_size=20)
    assert (found.train.examples, found.test.examples) == (9, 3)
    assert len(whole(found.test.epoch(0))[1]) == 3


@pytest.mark.parametrize("holdout", [0, 2, 1.5, 12, -1, True, "many"])
def test_rejects_holdouts_without_images_of_every_class(root: Path, holdout: object) -> None:
    with pytest.raises(WiringError, match="holdout"):
        data(root, holdout=holdout)


def test_imagenet_holds_out_images_of_folders_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ImageNet, "classes", 3)
    assert data(root, "imagenet", holdout=3).test.examples == 3
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "train-0.tar").touch()
    with pytest.raises(WiringError, match=r"data\.options\.holdout takes images of class folders, but .* has shards"):
        data(shards, "imagenet", holdout=3)


def test_holds_out_a_fraction_of_uneven_classes(root: Path) -> None:
    for which in range(4, 16):
        picture(root / "train" / "ant" / f"{which:02}.png", (1, 2, 3))
    found = data(root, holdout=0.25)
    assert np.bincount(found.test.labels).tolist() == [4, 1, 1]  # type: ignore[attr-defined]
    for which in range(1, 4):
        (root / "train" / "cow" / f"{which}.png").unlink()
    with pytest.raises(WiringError, match=r"takes an image of every class, but class 'cow' has only one"):
        data(root, holdout=0.25)
