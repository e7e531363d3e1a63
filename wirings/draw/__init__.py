"""Pictures of wirings. Needs matplotlib (``pip install "wirings[demo]"``)."""

from wirings.draw.layered import layered

__all__ = ["layered"]
