"""Networks of the paper's tables, by name: `get("tiny_static")`."""

from wirings.models.digits import DigitsClassifier, digits_static
from wirings.models.registry import get, names, register
from wirings.models.tiny import TinyClassifier, tiny_continuous, tiny_discrete, tiny_static

__all__ = [
    "DigitsClassifier",
    "TinyClassifier",
    "digits_static",
    "get",
    "names",
    "register",
    "tiny_continuous",
    "tiny_discrete",
    "tiny_static",
]
