"""Node functions, by their short address: `wirings.nodes`. They are made in `wirings.graph.nodes`."""

from wirings.graph.functions import NodeFunction
from wirings.graph.nodes import ActivationNode, ConvNode, Groups, Node, PerStep, PlainNode, TimeNode

__all__ = ["ActivationNode", "ConvNode", "Groups", "Node", "NodeFunction", "PerStep", "PlainNode", "TimeNode"]
