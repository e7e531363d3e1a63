"""Rules: how a wiring is chosen and how it changes. One small file per rule; `get` finds them by name."""

from wirings.rules.acdc import ACDC
from wirings.rules.decayed_gradient import DecayedGradient
from wirings.rules.dense import Dense
from wirings.rules.dnw import DNW
from wirings.rules.expander import Expander
from wirings.rules.fine_tune import FineTune
from wirings.rules.gmp import GMP
from wirings.rules.keep import Keep
from wirings.rules.l1_anneal import L1Anneal
from wirings.rules.lottery import Lottery
from wirings.rules.no_update import NoUpdate
from wirings.rules.planned import Planned
from wirings.rules.random import Random
from wirings.rules.registry import get, names, register
from wirings.rules.rigl import RigL
from wirings.rules.rule import EdgesLike, LayerLike, Rule, Training, choose_by
from wirings.rules.set import SET
from wirings.rules.soft_threshold import SoftThreshold
from wirings.rules.sparse_momentum import SparseMomentum
from wirings.rules.str import STR
from wirings.rules.targeted_dropout import TargetedDropout
from wirings.rules.top_kast import TopKAST

__all__ = [
    "ACDC",
    "DNW",
    "GMP",
    "SET",
    "STR",
    "DecayedGradient",
    "Dense",
    "EdgesLike",
    "Expander",
    "FineTune",
    "Keep",
    "L1Anneal",
    "LayerLike",
    "Lottery",
    "NoUpdate",
    "Planned",
    "Random",
    "RigL",
    "Rule",
    "SoftThreshold",
    "SparseMomentum",
    "TargetedDropout",
    "TopKAST",
    "Training",
    "choose_by",
    "get",
    "names",
    "register",
]
