"""A run that is broken off: what the tests of the loop and of resuming share."""

from wirings.train.log import Log


class BreakError(Exception):
    pass


class Stops(Log):
    """Raises after so many batches."""

    def __init__(self, after: int) -> None:
        self.left = after

    def batch(self, done: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise BreakError
