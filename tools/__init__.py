"""Checks of the code that `make lint` runs."""
