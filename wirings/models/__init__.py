"""The networks of the paper's tables and transformers, by name: ``get("tiny_static", rule="dnw")``.

A new model is one function under `register`, in a file that is imported in this package or by your own code.
"""

from wirings.models import expander, published  # noqa: F401 - registers their models
from wirings.models.beam_search import beam_search
from wirings.models.densenet import DenseNet
from wirings.models.digits import DigitsClassifier
from wirings.models.gpt import GPT
from wirings.models.mobilenet import MobileNetV1, MobileNetV1DNW
from wirings.models.option_groups import GraphWiring, LayerWiring, NetworkSize
from wirings.models.registry import get, names, options, register
from wirings.models.resnet import ResNet
from wirings.models.seq2seq import Seq2Seq
from wirings.models.shufflenetv1 import ShuffleNetV1
from wirings.models.tiny import TinyClassifier
from wirings.models.vit import ViT
from wirings.models.xception import Xception

__all__ = [
    "GPT",
    "DenseNet",
    "DigitsClassifier",
    "GraphWiring",
    "LayerWiring",
    "MobileNetV1",
    "MobileNetV1DNW",
    "NetworkSize",
    "ResNet",
    "Seq2Seq",
    "ShuffleNetV1",
    "TinyClassifier",
    "ViT",
    "Xception",
    "beam_search",
    "get",
    "names",
    "options",
    "register",
]
