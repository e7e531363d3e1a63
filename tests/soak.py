"""Whether tests run at their full length, which takes longer: ``WIRINGS_SOAK=1`` asks for every recipe and kill."""

import os

SOAK = os.environ.get("WIRINGS_SOAK") == "1"
