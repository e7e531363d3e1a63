"""Invalid arguments of graphs: always a WiringError that names the graph, the node or block, and a fix."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from wirings import Blocks, Complete, ContinuousGraph, Dag, DiscreteGraph, StaticGraph, WiringError
from wirings.graph import ActivationNode, ConvNode, Groups, PerStep

CYCLE = torch.zeros(6, 6, dtype=torch.bool)
for source, target in [(0, 2), (2, 3), (3, 4), (4, 2), (4, 5)]:
    CYCLE[target, source] = True
PARENTS = torch.zeros(4, 4, dtype=torch.bool)
PARENTS[1, 3] = PARENTS[3, 0] = True

MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a cycle": (
        lambda: StaticGraph(topology=CYCLE, inputs=1, outputs=1),
        r"StaticGraph: a static graph cannot have cycles.*: (2 → 3 → 4 → 2|3 → 4 → 2 → 3|4 → 2 → 3 → 4)\. Remove one",
    ),
    "complete": (
        lambda: StaticGraph(topology=Complete(4), inputs=1, outputs=1),
        r"StaticGraph: a complete graph has cyc",
    ),
    "a self-loop": (
        lambda: StaticGraph(topology=torch.eye(3, dtype=torch.bool), inputs=[0], outputs=1),
        r"node 0 is an input, so it cannot have parents",
    ),
    "an input with parents": (
        lambda: StaticGraph(topology=PARENTS, inputs=2, outputs=1),
        r"StaticGraph: node 1 is an input.*edge from node 3 to it.*DiscreteGraph",
    ),
    "too many edges": (
        lambda: StaticGraph([2, 3, 1], edges=12),
        r"StaticGraph: Blocks\(sizes=\[2, 3, 1\]\) allows 1 to 11 edges, got edges=12",
    ),
    "no edge": (
        lambda: DiscreteGraph(4, inputs=1, outputs=1, steps=1, edges=0),
        r"DiscreteGraph: .*1 to 16 edges, got edges=0",
    ),
    "a density above 1": (
        lambda: StaticGraph([2, 3], edges=1.5),
        r"StaticGraph: edges must be in \(0, 1\].*must be an int",
    ),
    "whole numbers": (lambda: StaticGraph([2, 3])(torch.ones(1, 2, dtype=torch.long)), r"floating-point.*int64"),
    "a number of blocks": (lambda: StaticGraph(5), r"Blocks expects a list with the size of each block, got 5"),
    "a recipe's class": (lambda: StaticGraph([2, 3], node=ConvNode), r"write ConvNode\(…\)"),
    "a module's class": (lambda: StaticGraph([2, 3], node=nn.Tanh), r"Tanh.* failed to make a module for 2 nodes"),
    "fewer nodes": (
        lambda: DiscreteGraph(4, inputs=2, outputs=2, steps=1, node=lambda n: nn.Linear(n, n - 1))(torch.ones(1, 2)),
        r"node= returned 3 nodes for 4",
    ),
    "fewer nodes in a block": (
        lambda: StaticGraph([2, 4, 2], node=lambda n: nn.Linear(n, n - 1))(torch.ones(1, 2)),
        r"node= returned \d nodes for \d",
    ),
    "an empty sequence": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, inflow="every")(torch.zeros(5, 0, 2)),
        r"the input sequence is empty",
    ),
    "states of other nodes": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, steps=1)(torch.zeros(2, 2), states=torch.ones(2, 3)),
        r"expects states of shape \(2, 4, …\), got \(2, 3\)",
    ),
    "states of another batch": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, steps=1)(torch.zeros(2, 2), states=torch.ones(3, 4)),
        r"expects states of shape \(2, 4, …\), got \(3, 4\)",
    ),
    "a step from other states": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, steps=1).step(torch.ones(2, 3), 0),
        r"expects states of shape \(batch, 4, …\)",
    ),
    "groups of different maps": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, steps=2, node=Groups([2, 2], [ConvNode(), ConvNode(stride=2)]))(
            torch.zeros(1, 2, 8, 8)
        ),
        r"Groups: .*different sizes, 8×8, 4×4.*pad=True",
    ),
    "groups without a list": (lambda: Groups(3, [None]), r"Groups: counts must be a list, got 3"),
    "more nodes than can be counted": (
        lambda: ContinuousGraph(10**30, inputs=1, outputs=1),
        r"nodes must be a whole number from 1 to 2147483647, got 10",
    ),
    "an array of edges for a rule with its own": (
        lambda: ContinuousGraph(4, inputs=1, outputs=1, rule="dense", edges=np.zeros((50, 50))),
        r"^.{1,200}$",
    ),
    "a stride beyond all maps": (lambda: ConvNode(stride=2**70), r"stride must be a whole number from 1 to 1048576"),
    "a group of no nodes": (lambda: Groups([0, 4], [None, None]), r"Groups: each count must be a whole number"),
    "no steps for functions": (lambda: PerStep(ActivationNode(), 0), r"PerStep: steps must be a whole number"),
    "parts that are no list": (lambda: ConvNode(before=None), r"expect lists of parts"),
    "activations": (lambda: ActivationNode(["relu"]), r"unknown activation"),
    "a list for a solver": (lambda: ContinuousGraph(4, inputs=1, outputs=1, solver=["rk4"]), r"unknown solver"),
    "no tolerance": (lambda: ContinuousGraph(4, inputs=1, outputs=1, rtol=None), r"rtol must be positive"),
    "a time beyond float32": (
        lambda: ContinuousGraph(4, inputs=1, outputs=1, solver="euler", steps=1, until=1e300),
        r"times must be finite, got 1e\+300 to 1e\+300 for a state in torch.float32",
    ),
    "a time beyond all floats": (
        lambda: ContinuousGraph(4, inputs=1, outputs=1, until=10**400),
        r"times must be finite",
    ),
    "a tolerance beyond all floats": (
        lambda: ContinuousGraph(4, inputs=1, outputs=1, rtol=10**400),
        r"rtol must be positive and finite",
    ),
    "a word for a time": (lambda: ContinuousGraph(4, inputs=1, outputs=1, until="1"), r"times must be finite"),
    "one value for a batch norm": (
        lambda: StaticGraph([2, 3], node=ConvNode("batch"))(torch.zeros(1, 2, 1, 1)),
        r"batch norm needs more than one value",
    ),
    "one value for an instance norm": (
        lambda: StaticGraph([2, 3], node=ConvNode("instance", before=["conv", "norm"], after=[], stride=2))(
            torch.zeros(2, 2, 2, 2)
        ),
        r"instance norm needs maps of more than one pixel, got one pixel after the convolution",
    ),
    "more edges than fit into memory": (
        lambda: ContinuousGraph(10**7, inputs=1, outputs=1),
        r"ContinuousGraph: 100,000,000,000,000 allowed edges take .* GiB, which cannot be allocated. Use fewer nodes",
    ),
    "a tensor for a time": (
        lambda: ContinuousGraph(4, inputs=1, outputs=1, until=torch.zeros(50, 50)),
        r"times must be finite, got .* to a Tensor of shape \(50, 50\)",
    ),
    "an array for what is read": (
        lambda: DiscreteGraph(4, inputs=1, outputs=1, steps=1, reads=np.zeros((30, 30))),
        r"unknown reads .{0,70}…'\. Choose from",
    ),
    "an array for a norm": (lambda: ConvNode(norm=np.zeros((30, 30))), r"unknown norm .{0,70}…'\. Choose from"),
    "an array for dimensions": (
        lambda: ConvNode(dims=np.zeros((30, 30))),
        r"dims must be .* ndarray of shape \(30, 30\)",
    ),
    "an array for a part": (lambda: ConvNode(before=[np.zeros((30, 30))]), r"unknown part .{0,70}…'\. Choose from"),
    "an array for a node": (
        lambda: StaticGraph([2, 3], node=np.zeros((30, 30))),
        r"node= expects a recipe .* got a ndarray of shape \(30, 30\)",
    ),
    "a batch norm computed twice": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, steps=2, node=ConvNode("batch"), checkpoint=True),
        r"checkpoint=True computes each step twice",
    ),
    "a batch norm in the adjoint": (
        lambda: ContinuousGraph(4, inputs=2, outputs=1, node=ConvNode("batch"), adjoint=True),
        r"adjoint=True computes each step twice",
    ),
    "kinds that cannot come one by one": (
        lambda: StaticGraph(
            topology=Dag(6, inputs=2), outputs=1, node=Groups([2, 4], [None, PerStep(ActivationNode(), 2)])
        ),
        r"without blocks, nodes are computed one by one",
    ),
    "a matrix that is no tensor": (
        lambda: StaticGraph([2, 3]).set_matrix_([[1.0]]),
        r"set_matrix_\(\) expects a tensor, got list",
    ),
    "a rule without a budget": (lambda: StaticGraph([2, 3], rule="dnw"), r"StaticGraph: rule 'dnw' needs edges="),
    "a budget for a rule with its own": (
        lambda: StaticGraph([2, 3], rule="dense", edges=3),
        r"'dense' sets the number of edges itself; remove edges=3",
    ),
    "an unknown rule": (lambda: StaticGraph([2, 3], rule="dwn", edges=2), r"unknown rule 'dwn'. Did you mean 'dnw'"),
    "an input outside": (
        lambda: DiscreteGraph(4, inputs=[0, 4], outputs=1, steps=1),
        r"DiscreteGraph: node 4 in inputs=\[0, 4\] is out of range; the graph's nodes are 0 to 3",
    ),
    "too many inputs": (
        lambda: ContinuousGraph(4, inputs=5, outputs=1),
        r"ContinuousGraph: inputs must be 1 to 4, the number of nodes, got 5",
    ),
    "too many outputs": (
        lambda: ContinuousGraph(4, inputs=1, outputs=9),
        r"ContinuousGraph: outputs must be 1 to 4, the number of nodes, got 9",
    ),
    "an output twice": (
        lambda: StaticGraph([2, 3], outputs=[4, 4]),
        r"StaticGraph: outputs=\[4, 4\] contains duplicate nodes",
    ),
    "no inputs": (lambda: DiscreteGraph(4, outputs=1, steps=1), r"DiscreteGraph needs inputs=: a number of nodes"),
    "inputs that are no block": (
        lambda: StaticGraph([2, 3], inputs=3),
        r"the inputs are the first block, nodes 0 to 1",
    ),
    "inputs that are not the Dag's": (
        lambda: StaticGraph(topology=Dag(5, inputs=2), inputs=3, outputs=1),
        r"the inputs of Dag\(5, inputs=2\) are its first 2 nodes",
    ),
    "inputs that are words": (
        lambda: DiscreteGraph(4, inputs="two", outputs=1, steps=1),
        r"inputs= expects a number of nodes \(the first ones\) or a list of node numbers, got 'two'",
    ),
    "no topology": (lambda: StaticGraph(), r"StaticGraph expects exactly one of blocks=, topology=, got none"),
    "two topologies": (
        lambda: DiscreteGraph(4, blocks=[2, 2], inputs=1, outputs=1, steps=1),
        r"got nodes and blocks",
    ),
    "one block": (lambda: StaticGraph([4]), r"at least 2 blocks"),
    "an empty block": (lambda: StaticGraph([4, 0, 2]), r"the size of block 1 must be a whole number"),
    "a reach of 0": (lambda: Blocks([4, 2], reach=0), r"reach must be a whole number"),
    "a Dag of inputs": (lambda: Dag(3, inputs=3), r"leaves no node to wire"),
    "a matrix of floats": (
        lambda: StaticGraph(topology=torch.ones(3, 3), inputs=1, outputs=1),
        r"square boolean matrix",
    ),
    "a matrix without edges": (
        lambda: DiscreteGraph(topology=torch.zeros(3, 3, dtype=torch.bool), inputs=1, outputs=1, steps=1),
        r"allows no edge at all",
    ),
    "no steps": (lambda: DiscreteGraph(4, inputs=1, outputs=1), r"DiscreteGraph needs steps="),
    "half a step": (lambda: DiscreteGraph(4, inputs=1, outputs=1, steps=1.5), r"steps must be a whole number"),
    "an unknown inflow": (
        lambda: DiscreteGraph(4, inputs=1, outputs=1, steps=1, inflow="evry"),
        r"unknown inflow 'evry'. Did you mean 'every'",
    ),
    "recipes for other blocks": (
        lambda: StaticGraph([2, 3, 4], node=[None, ActivationNode()]),
        r"StaticGraph: node= has 2 recipes for 3 blocks",
    ),
    "recipes without blocks": (
        lambda: DiscreteGraph(4, inputs=1, outputs=1, steps=1, node=[None]),
        r"node= expects one recipe for all nodes",
    ),
    "a finished module": (
        lambda: StaticGraph([2, 3], node=nn.ReLU()),
        r"node= expects a recipe.*got ReLU.*lambda",
    ),
    "an unknown norm": (lambda: ConvNode("layer"), r"unknown norm 'layer'"),
    "an unknown activation": (lambda: ActivationNode("relo"), r"unknown activation 'relo'. Did you mean 'relu'"),
    "an unknown part": (lambda: ConvNode(before=["relu", "conv"]), r"unknown part 'relu'"),
    "a part twice": (lambda: ConvNode(before=["conv"], after=["conv"]), r"'conv' is in both before= and after="),
    "a part for a list": (lambda: ConvNode(before="conv"), r"lists of parts: write \['conv'\]"),
    "an even kernel": (lambda: ConvNode(kernel=2), r"kernel must be odd"),
    "a norm that adds nothing": (lambda: ConvNode(eps=0.0), r"eps must be a positive number, got 0.0"),
    "four dimensions": (lambda: ConvNode(dims=4), r"dims must be 1, 2 or 3"),
    "groups without kinds": (lambda: Groups([2], []), r"got 1 counts for 0 kinds"),
    "other inputs": (
        lambda: StaticGraph([3, 4, 2])(torch.zeros(5, 4)),
        r"StaticGraph has 3 input nodes and expects a floating-point tensor \(batch, inputs, …\), got .* \(5, 4\)",
    ),
    "no sequence": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, inflow="every")(torch.zeros(5, 2)),
        r"expects a floating-point tensor \(batch, time, inputs, …\), got a tensor of shape \(5, 2\)",
    ),
    "too long a sequence": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, steps=2, inflow="every")(torch.zeros(5, 3, 2)),
        r"DiscreteGraph has 2 steps, got a sequence of 3",
    ),
    "maps for scalars": (
        lambda: StaticGraph([3, 4, 2], node=ConvNode())(torch.zeros(5, 3)),
        r"ConvNode\(dims=2\) expects maps of 2 dimensions.*shape \(5, 3\)",
    ),
    "maps of one pixel": (
        lambda: StaticGraph([3, 4, 2], node=ConvNode())(torch.zeros(5, 3, 1, 1)),
        r"instance norm.*one pixel",
    ),
    "a stride that edges pass by": (
        lambda: StaticGraph([3, 4, 4, 2], node=[ConvNode(), ConvNode(stride=2), ConvNode(), None])(
            torch.zeros(1, 3, 8, 8)
        ),
        r"StaticGraph: block 2 receives maps of different sizes, 4×4 and 8×8.*reach=1",
    ),
    "a stride in a dynamic graph": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, steps=2, node=ConvNode(stride=2), reads="every")(
            torch.zeros(1, 2, 8, 8)
        ),
        r"DiscreteGraph.*maps.*pad=True",
    ),
    "a stride in a continuous graph": (
        lambda: ContinuousGraph(4, inputs=2, outputs=1, node=ConvNode(stride=2))(torch.zeros(1, 2, 8, 8)),
        r"ContinuousGraph.*maps.*pad=True",
    ),
    "more steps than functions": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, steps=3, node=PerStep(ActivationNode(), 2))(torch.zeros(1, 2)),
        r"functions for steps 0 to 1, but the graph is at time 2",
    ),
    "blocks as text": (lambda: StaticGraph("abc"), r"Blocks expects a list with the size of each block, got 'abc'"),
    "inputs that are a tensor of floats": (
        lambda: DiscreteGraph(4, inputs=torch.rand(1000), outputs=1, steps=1),
        r"inputs= expects .* list of node numbers, got Tensor of shape \(1000,\)",
    ),
    "inputs that are lists of lists": (
        lambda: DiscreteGraph(4, inputs=[[0], [1, 2]], outputs=1, steps=1),
        r"inputs= expects .*, got list",
    ),
    "states that are a list": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, steps=1)(torch.zeros(2, 2), states=[1.0]),
        r"expects states of shape \(2, 4, …\), got list",
    ),
    "a checkpoint that is a word": (
        lambda: DiscreteGraph(4, inputs=2, outputs=1, steps=1, checkpoint="yes"),
        r"DiscreteGraph: checkpoint must be",
    ),
    "an adjoint that is a word": (
        lambda: ContinuousGraph(4, inputs=2, outputs=1, adjoint="yes"),
        r"ContinuousGraph: adjoint must be",
    ),
    "an unknown node": (lambda: StaticGraph([2, 3], node="cnov"), r"unknown node 'cnov'. Did you mean 'conv'"),
    "a node that needs settings": (lambda: StaticGraph([2, 3], node="groups"), r"Use Groups\(…\) instead"),
    "a matrix of another size": (
        lambda: StaticGraph([2, 3]).set_matrix_(torch.zeros(4, 4)),
        r"expects shape \(5, 5\) for 5 nodes, got \(4, 4\)",
    ),
    "a matrix with other edges": (
        lambda: StaticGraph([2, 3]).set_matrix_(torch.ones(5, 5)),
        r"the edge from node 0 to node 0, which the topology does not allow",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_rejects_invalid_arguments(mistake: str) -> None:
    run, message = MISTAKES[mistake]
    with pytest.raises(WiringError, match=message):
        run()


@pytest.mark.parametrize("norm", [None, "instance", "batch"])
@pytest.mark.parametrize("parts", [{}, {"before": [], "after": ["conv"]}], ids=["before", "after"])
def test_rejects_strides_between_nodes_that_are_computed_one_by_one(norm: str | None, parts: dict) -> None:
    graph = StaticGraph(topology=Dag(8, inputs=3), outputs=2, node=ConvNode(norm=norm, stride=2, **parts))
    with pytest.raises(WiringError, match=r"StaticGraph: node 4 receives maps of different sizes, .* reach=1"):
        graph(torch.randn(2, 3, 8, 8))
