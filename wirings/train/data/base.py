"""What a data set is: the `Dataset` contract, the registry, and the loaders that training reads batches from.

The batches of a loader are a pure function of the seed, the epoch and the batch to start from, so a run that is resumed
in the middle of an epoch sees what it would have seen without the interruption. With several processes (ranks), each
rank takes its slice of every batch: together they see what one process would see.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from wirings.errors import WiringError, unknown
from wirings.train.data.augment import DEFAULT_IMAGE_SIZE, Normalise, centre_crop
from wirings.train.data.metrics import ACCURACY, Metric
from wirings.train.data.sampling import rank_slices
from wirings.utils.checks import is_int
from wirings.utils.files import check_path
from wirings.utils.importing import import_function, is_import_path
from wirings.utils.text import brief

if TYPE_CHECKING:
    from PIL.Image import Image


class Loader(ABC):
    """Batches of examples and labels, epoch by epoch.

    Args:
        examples: Number of examples of an epoch, over all ranks.
        batch: Number of examples of a batch, over all ranks.
        rank: Which process this is, from 0.
        world: Number of processes.
    """

    padded: bool = False
    """Whether some labels are -100, which the loss ignores. The loss is then averaged over the others of a batch."""

    def __init__(self, examples: int, batch: int, rank: int = 0, world: int = 1) -> None:
        if not 0 <= rank < world:
            raise WiringError(f"rank must be from 0 to world - 1, got rank = {rank} and world = {world}.")
        if batch < 1 or batch % world:
            raise WiringError(
                "batch, the number of examples over all ranks, must be a positive multiple of the number of ranks, "
                f"got batch = {batch} and world = {world}."
            )
        if examples < 1:
            raise WiringError(f"a data set needs at least one example, got {examples}.")
        self.examples, self.batch, self.rank, self.world = examples, batch, rank, world

    def __len__(self) -> int:
        """Number of batches of an epoch, the same on every rank. The last batch may be smaller than the others."""
        return -(-self.examples // self.batch)

    def sizes(self) -> list[int]:
        """Return this rank's batch sizes over an epoch, in order.

        The last batch is split as evenly as possible, so a rank's part of it may be empty.
        """
        return [len(mine) for mine in rank_slices(self.examples, self.batch, self.rank, self.world)]

    def batch_size(self, number: int) -> int:
        """Return the size of batch ``number`` of an epoch, over all ranks."""
        return min(self.batch, self.examples - number * self.batch)

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of the batches of an epoch.

        Args:
            number: The epoch, from 0.
            start: The first batch to yield, from 0.

        Returns:
            An iterator over normalised float32 images, (n, channels, height, width), and int64 labels, (n,); or over
            int64 tokens, (n, context), and the tokens that follow them, (n, context), -100 for none. All are on the
            loader's device.
        """

    def check_epoch(self, number: int, start: int) -> None:
        """Raise unless ``number`` is an epoch and ``start`` one of its batches (or its end)."""
        if number < 0 or not 0 <= start <= len(self):
            raise WiringError(
                f"expected an epoch of at least 0 and a first batch from 0 to {len(self)}, got epoch {number} and "
                f"batch {start}."
            )


@dataclass(frozen=True)
class Measured:
    """What a data set measures beyond the loss."""

    value: float | None
    """The metric's value, or None if it follows from the loss."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts for the run's folder, such as translations, by file name."""


@dataclass(frozen=True)
class Data:
    """A loaded data set, ready to train on."""

    name: str
    """Name of the data set."""
    classes: int
    """Number of classes; of tokens, the size of the vocabulary."""
    shape: tuple[int, ...]
    """Shape of an example as the model sees it: channels, height and width of an image, or the number of tokens."""
    train: Loader
    """Training batches: shuffled, and augmented if that was asked for."""
    test: Loader
    """Test batches: never shuffled, never augmented. With a holdout, the held-out training examples."""
    md5: str | None = None
    """Checksum of the data, for data sets that have one."""
    names: tuple[str, ...] | None = None
    """Names of the classes, in order, if they are read from the files; of tokens, the characters."""
    tokens: bool = False
    """Whether examples are tokens, int64, each labelled with the next one, rather than images."""
    metric: Metric = ACCURACY
    """What a model is measured by on the test batches."""
    measure: Callable[[nn.Module], Measured] | None = None
    """Measures a model that is not wired and in evaluation mode, where the loss does not tell the metric."""

    @property
    def unit(self) -> str:
        """What is counted when the speed of training is measured, and the name of the log's column."""
        return "tokens" if self.tokens else "images"


@dataclass(frozen=True)
class LoadOptions:
    """Options that every data set is loaded with. See `load`."""

    directory: Path | None
    batch: int
    device: torch.device
    seed: int
    rank: int
    world: int
    augment: bool
    workers: int
    image_size: int | None
    skip_corrupt: bool


class Dataset(ABC):
    """A data set: its facts, and how it is loaded.

    To add a data set, subclass `ImageDataset` or this in a file of its own, set the attributes, implement `load`, and
    decorate the class with `register_dataset`.
    """

    name: str = ""
    """Name in the registry; set by `register_dataset`."""
    title: str = ""
    """Name for people, such as ``"CIFAR-10"``; the registered name by default."""
    classes: int | None = None
    """Number of classes or tokens, or None if it is known only once the data is loaded."""
    class_names: tuple[str, ...] | None = None
    """Names of the classes, in order, or None if the data set has none or reads them from its files."""
    image_size: int | None = None
    """Height and width of the images in pixels, or None if the user chooses them."""
    reads_files: bool = True
    """Whether the data is read from files, so that `load` takes a directory."""
    can_fetch: bool = False
    """Whether `fetch` downloads and prepares the data."""
    held_out: Mapping[str, Any] = MappingProxyType({})
    """Options of `load` that test on a part of the training data, or on data apart from the test set, by which
    `wirings tune` chooses settings. Empty if there are none."""

    @abstractmethod
    def load(self, options: LoadOptions) -> Data:
        """Load the data. Keyword-only parameters of an implementation are the data set's own options."""

    def fetch(self, directory: Path | None = None) -> Path:
        """Find or download the data, check and prepare it, and return its path. Only if ``can_fetch`` is true.

        Args:
            directory: A folder that may hold the data already.
        """
        raise WiringError(f"data set {self.name!r} cannot be fetched.")

    def write_sample(self, folder: Path) -> dict[str, Any]:
        """Write a few made-up examples to an empty folder, in the layout that `load` reads.

        This lets tests and dry runs go without the real data.

        Returns:
            Arguments for `wirings.train.data.load` that load the sample; by default none.
        """
        return {}


class ImageDataset(Dataset):
    """A data set of labelled images, which also says how a user's image is prepared for prediction."""

    mean: tuple[float, ...]
    """Mean of each channel that images are normalised with, where pixels range from 0 to 1."""
    std: tuple[float, ...]
    """Standard deviation of each channel that images are normalised with."""

    def with_options(self, options: Mapping[str, Any]) -> ImageDataset:
        """This data set as it is with options of `load`, for those that change how images are prepared."""
        return self

    def square(self, image: Image, side: int) -> Image:
        """A user's image of any size as a square of ``side`` pixels."""
        return image if image.size == (side, side) else centre_crop(image, side)

    def prepare_image(self, image: Image, image_size: int | None = None) -> Tensor:
        """Prepare a user's image for prediction: crop the centre and normalise it as the test images are.

        Args:
            image: An RGB image of any size.
            image_size: Height and width that the model was trained with, for data sets without a size of their own.

        Returns:
            The image as a model expects it, float32 (channels, height, width).
        """
        side = self.image_size or image_size or DEFAULT_IMAGE_SIZE
        image = image.convert("L" if len(self.mean) == 1 else "RGB")
        image = self.square(image, side)
        pixels = torch.from_numpy(np.array(image)).view(side, side, len(self.mean)).permute(2, 0, 1)
        return Normalise(self.mean, self.std)(pixels[None])[0]


_registry: dict[str, Dataset] = {}
D = TypeVar("D", bound=Dataset)


def register_dataset(name: str) -> Callable[[type[D]], type[D]]:
    """Class decorator that makes a `Dataset` available under ``name``."""

    def add(kind: type[D]) -> type[D]:
        if not (inspect.isclass(kind) and issubclass(kind, Dataset)):
            raise WiringError(f"register_dataset({name!r}) expects a subclass of Dataset, got {kind!r}.")
        present = type(_registry.get(name, kind))
        # The same class again is fine: notebooks run a cell twice.
        if name in _registry and (present.__module__, present.__qualname__) != (kind.__module__, kind.__qualname__):
            raise WiringError(f"a data set named {name!r} is registered already. Choose another name.")
        dataset = kind()
        dataset.name, dataset.title = name, kind.title or name
        _registry[name] = dataset
        return kind

    return add


def names() -> list[str]:
    """Return the names of the registered data sets, sorted."""
    return sorted(_registry)


class _FunctionDataset(ImageDataset):
    """A data set that a user's function loads; only that function knows its classes and how images are prepared."""

    def __init__(self, name: str, function: Callable[..., Data]) -> None:
        self.name = self.title = name
        self.load = function  # type: ignore[method-assign]  # its own keyword-only parameters are the options

    def load(self, options: LoadOptions) -> Data:  # replaced by the function
        raise NotImplementedError

    def prepare_image(self, image: Image, image_size: int | None = None) -> Tensor:
        raise WiringError(
            f"only your own code knows how to prepare an image for {self.name}. Write an ImageDataset and name that "
            "class instead, or open the run with wirings.train.saved_runs.open_run and call the model."
        )


def get(name: str) -> Dataset:
    """Return the registered data set of this name, or a user's own, given as ``package.module:name``."""
    if is_import_path(name):
        own: Any = import_function(name, "data.name")
        if not (inspect.isclass(own) and issubclass(own, Dataset)):
            return _FunctionDataset(name, own)
        dataset = own()
        dataset.name, dataset.title = name, own.title or name
        return dataset
    if name not in _registry:
        raise unknown("data set", name, names())
    return _registry[name]


def load(
    name: str,
    *,
    directory: Path | str | None = None,
    batch: int = 512,
    device: str | torch.device = "cpu",
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    augment: bool = True,
    workers: int = 4,
    image_size: int | None = None,
    skip_corrupt: bool = False,
    **own: Any,
) -> Data:
    """Load a data set by name.

    Args:
        name: One of `names`.
        directory: Folder that holds the files; of text, also a single file. Data that can be downloaded is looked for
            there first.
        batch: Number of examples of a batch, over all ranks.
        device: Device of the batches. Small data sets are kept there as a whole.
        seed: Random seed of the order and the augmentation of every epoch (and of the examples of synthetic data).
        rank: Which process this is, from 0.
        world: Number of processes.
        augment: Whether training images are cropped and flipped at random.
        workers: Number of processes that decode images; 0 decodes in this process. Ignored by data sets that are kept
            on the device.
        image_size: Height and width in pixels, for data sets without a size of their own.
        skip_corrupt: Whether to skip images that cannot be decoded and list them in ``loader.skipped``. Otherwise they
            raise an error.
        own: Options of this data set alone. See its class.
    """
    dataset = get(name)
    choices = [p.name for p in inspect.signature(dataset.load).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for key in own:
        if key not in choices:
            if not choices:
                raise WiringError(f"data set {name!r} has no options of its own, got {key!r}.")
            raise unknown(f"option of data set {name!r}:", key, choices)
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise WiringError(f"device is {str(where)!r}, but PyTorch finds no CUDA device. Use device='cpu'.")
    sizes = (("batch", batch, 1), ("seed", seed, 0), ("workers", workers, 0), ("image_size", image_size, 1))
    for what, value, least in sizes:
        if value is None and what == "image_size":
            continue
        if not is_int(value) or not least <= value < 2**63:
            raise WiringError(f"{what} must be an integer of at least {least}, got {brief(value)}.")
    if directory is not None and not dataset.reads_files:
        raise WiringError(f"data set {name!r} reads no files, got directory = {directory}. Leave it out.")
    if image_size is not None and not isinstance(dataset, ImageDataset):
        raise WiringError(f"data set {name!r} has no images, got image_size = {image_size}. Leave it out.")
    if dataset.image_size is not None and image_size not in (None, dataset.image_size):
        size = dataset.image_size
        raise WiringError(
            f"the images of {name!r} have {size} × {size} pixels, got image_size = {image_size}. Leave it out."
        )
    folder = None if directory is None else check_path(directory)
    options = LoadOptions(folder, batch, where, seed, rank, world, augment, workers, image_size, skip_corrupt)
    data = dataset.load(options, **own)
    if not isinstance(data, Data):
        raise WiringError(f"{name} must return a wirings.train.data.Data, got {type(data).__name__}.")
    return data
