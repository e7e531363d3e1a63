"""Whether tests run at their full length: ``WIRINGS_SOAK=1`` asks for every recipe, run and kill, which takes longer."""

import os

SOAK = os.environ.get("WIRINGS_SOAK") == "1"
