"""Data sets, one file each, found by name.

A new data set is one file with a class under `register_dataset`, imported in this package or by your own code.
"""

from wirings.train.data.base import (
    Data,
    Dataset,
    ImageDataset,
    Loader,
    LoadOptions,
    Measured,
    get,
    load,
    names,
    register_dataset,
)
from wirings.train.data.cifar10 import CIFAR10
from wirings.train.data.cifar100 import CIFAR100
from wirings.train.data.device import DeviceLoader, device_loaders
from wirings.train.data.digits import Digits
from wirings.train.data.folder import ImageFolder
from wirings.train.data.imagenet import ImageNet
from wirings.train.data.metrics import Metric
from wirings.train.data.multi30k import Multi30k
from wirings.train.data.pair_loader import PairLoader
from wirings.train.data.shakespeare import Shakespeare
from wirings.train.data.shards import Shards
from wirings.train.data.synthetic import Synthetic
from wirings.train.data.text import Text
from wirings.train.data.text_loader import TextLoader, text_loaders

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "Data",
    "Dataset",
    "DeviceLoader",
    "Digits",
    "ImageDataset",
    "ImageFolder",
    "ImageNet",
    "LoadOptions",
    "Loader",
    "Measured",
    "Metric",
    "Multi30k",
    "PairLoader",
    "Shakespeare",
    "Shards",
    "Synthetic",
    "Text",
    "TextLoader",
    "device_loaders",
    "get",
    "load",
    "names",
    "register_dataset",
    "text_loaders",
]
