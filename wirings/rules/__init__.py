"""Rules: how a wiring is chosen and how it changes. One small file a rule, found by name."""

from wirings.rules.base import Edges, Layer, Pool, Rule, choose_together, get, names, register
from wirings.rules.dense import Dense
from wirings.rules.dnw import DNW
from wirings.rules.expander import Expander
from wirings.rules.fine_tune import FineTune
from wirings.rules.l1_anneal import L1Anneal
from wirings.rules.lottery import Lottery
from wirings.rules.no_update import NoUpdate
from wirings.rules.planned import Planned
from wirings.rules.random import Random
from wirings.rules.sparse_momentum import SparseMomentum
from wirings.rules.targeted_dropout import TargetedDropout

__all__ = [
    "DNW",
    "Dense",
    "Edges",
    "Expander",
    "FineTune",
    "L1Anneal",
    "Layer",
    "Lottery",
    "NoUpdate",
    "Planned",
    "Pool",
    "Random",
    "Rule",
    "SparseMomentum",
    "TargetedDropout",
    "choose_together",
    "get",
    "names",
    "register",
]
