"""Networks of the paper's tables, by name: `get("tiny_static")`."""

from wirings.models.densenet import DenseNet, densenet
from wirings.models.digits import DigitsClassifier, digits_static
from wirings.models.expander import mobilenetv1_x
from wirings.models.mobilenet import MobileNetV1, MobileNetV1DNW, mobilenetv1, mobilenetv1_dnw
from wirings.models.published import mnasnet, mobilenetv2, shufflenetv2
from wirings.models.registry import get, names, register
from wirings.models.resnet import ResNet, resnet18, resnet50
from wirings.models.shufflenetv1 import ShuffleNetV1, shufflenetv1
from wirings.models.tiny import TinyClassifier, tiny_continuous, tiny_discrete, tiny_static
from wirings.models.xception import Xception, xception

__all__ = [
    "DenseNet",
    "DigitsClassifier",
    "MobileNetV1",
    "MobileNetV1DNW",
    "ResNet",
    "ShuffleNetV1",
    "TinyClassifier",
    "Xception",
    "densenet",
    "digits_static",
    "get",
    "mnasnet",
    "mobilenetv1",
    "mobilenetv1_dnw",
    "mobilenetv1_x",
    "mobilenetv2",
    "names",
    "register",
    "resnet18",
    "resnet50",
    "shufflenetv1",
    "shufflenetv2",
    "tiny_continuous",
    "tiny_discrete",
    "tiny_static",
    "xception",
]
