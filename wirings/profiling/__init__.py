"""Parameters and multiply-adds of any model: dense, real (as the paper counts) and live. See `profile`."""

from wirings.profiling.count import profile
from wirings.profiling.report import Profile, ProfileRow

__all__ = ["Profile", "ProfileRow", "profile"]
