"""Data sets, one file each, found by name.

A new data set is one file with a class under `register_dataset`, imported in this package or by your own code.
"""

from wirings.train.data.base import Data, ImageDataset, Loader, LoadOptions, get, load, names, register_dataset
from wirings.train.data.cifar10 import CIFAR10
from wirings.train.data.device import DeviceLoader, device_loaders
from wirings.train.data.digits import Digits
from wirings.train.data.folder import ImageFolder
from wirings.train.data.imagenet import ImageNet
from wirings.train.data.shards import Shards
from wirings.train.data.synthetic import Synthetic

__all__ = [
    "CIFAR10",
    "Data",
    "DeviceLoader",
    "Digits",
    "ImageDataset",
    "ImageFolder",
    "ImageNet",
    "LoadOptions",
    "Loader",
    "Shards",
    "Synthetic",
    "device_loaders",
    "get",
    "load",
    "names",
    "register_dataset",
]
