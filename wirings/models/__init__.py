"""Networks of the paper's tables, by name: `get("tiny_static")`."""

from wirings.models.digits import DigitsClassifier, digits_static
from wirings.models.mobilenet import MobileNetV1, MobileNetV1DNW, mobilenetv1, mobilenetv1_dnw
from wirings.models.registry import get, names, register
from wirings.models.tiny import TinyClassifier, tiny_continuous, tiny_discrete, tiny_static

__all__ = [
    "DigitsClassifier",
    "MobileNetV1",
    "MobileNetV1DNW",
    "TinyClassifier",
    "digits_static",
    "get",
    "mobilenetv1",
    "mobilenetv1_dnw",
    "names",
    "register",
    "tiny_continuous",
    "tiny_discrete",
    "tiny_static",
]
