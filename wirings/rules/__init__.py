"""Rules: how a wiring is chosen and how it changes. One small file a rule, found by name."""

from wirings.rules.base import Edges, Layer, Pool, Rule, choose_together, get, names, register
from wirings.rules.dense import Dense
from wirings.rules.dnw import DNW
from wirings.rules.fine_tune import FineTune
from wirings.rules.lottery import Lottery
from wirings.rules.no_update import NoUpdate
from wirings.rules.random import Random

__all__ = [
    "DNW",
    "Dense",
    "Edges",
    "FineTune",
    "Layer",
    "Lottery",
    "NoUpdate",
    "Pool",
    "Random",
    "Rule",
    "choose_together",
    "get",
    "names",
    "register",
]
