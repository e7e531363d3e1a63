"""Which nodes and edges of a graph are alive: on a path from an input to an output.

The one implementation for `Graph.dead_nodes` and `wirings.profile`. A graph is given as NumPy arrays: edge i leads from
node ``sources[i]`` to node ``targets[i]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Liveness:
    """What is alive at each step of the graph. Arrays are boolean.

    A static or continuous-time graph has one time, a discrete-time graph one for each step. The four arrays of shape
    (times, nodes) tell apart what a node sends along the edges from what it has received when they have been passed.
    """

    sources: np.ndarray
    targets: np.ndarray
    sent: np.ndarray
    """(times, nodes): what the node sends depends on an input."""
    onward: np.ndarray
    """(times, nodes): what the node sends reaches an output."""
    arrived: np.ndarray
    """(times, nodes): what the node has received depends on an input."""
    counted: np.ndarray
    """(times, nodes): what the node has received reaches an output."""
    fed: np.ndarray
    """(nodes,): what the node holds depends on an input when outputs are read."""
    used: np.ndarray
    """(nodes,): what the node holds reaches an output if it is there when inputs are fed."""

    @property
    def edges(self) -> np.ndarray:
        """(times, edges): the edges that are alive."""
        return self.sent[:, self.sources] & self.counted[:, self.targets]

    @property
    def sends(self) -> np.ndarray:
        """(times, nodes): the nodes whose function before the edges is alive."""
        return self.sent & self.onward

    @property
    def receives(self) -> np.ndarray:
        """(times, nodes): the nodes whose function after the edges is alive."""
        return self.arrived & self.counted

    @property
    def nodes(self) -> np.ndarray:
        """(nodes,): the nodes that are alive at any time."""
        return np.asarray((self.sends | self.receives).any(0))


def path_liveness(
    sources: np.ndarray, targets: np.ndarray, nodes: int, inputs: np.ndarray, outputs: np.ndarray
) -> Liveness:
    """What is on a path from an input to an output, in a graph that is not run in steps.

    Args:
        sources: the node that each edge leaves.
        targets: the node that each edge leads to.
        nodes: the number of nodes.
        inputs: the numbers of the input nodes.
        outputs: the numbers of the output nodes. A node that is an input and an output is alive without an edge.
    """
    forward = reached(inputs, sources, targets, nodes)
    backward = reached(outputs, targets, sources, nodes)
    onward = _ends(sources[backward[targets]], nodes)
    alike = forward[None], onward[None], forward[None], backward[None]
    return Liveness(sources, targets, *alike, forward, backward)


def step_liveness(
    sources: np.ndarray,
    targets: np.ndarray,
    nodes: int,
    inputs: np.ndarray,
    outputs: np.ndarray,
    *,
    steps: int | None,
    input_steps: int | None = 1,
    read_every_step: bool = False,
) -> Liveness:
    """What is on a walk of at least one edge from an input, when it is fed, to an output, when it is read.

    Outputs are read after the edges have been passed, before the next part of a sequence is added.

    Args:
        sources: the node that each edge leaves.
        targets: the node that each edge leads to.
        nodes: the number of nodes.
        inputs: the numbers of the input nodes.
        outputs: the numbers of the output nodes.
        steps: the number of steps. None: any number, so that walks of all lengths count, as a single time.
        input_steps: in how many of the first steps the inputs are fed; None: in all.
        read_every_step: whether outputs are read after every step, or after the last one only.
    """
    if steps is None:
        forward, backward = reached(inputs, sources, targets, nodes), reached(outputs, targets, sources, nodes)
        fed, used = _ends(targets[forward[sources]], nodes), _ends(sources[backward[targets]], nodes)
        return Liveness(sources, targets, forward[None], used[None], fed[None], backward[None], fed, used)
    fed_steps = steps if input_steps is None else input_steps
    sent, onward, arrived, counted = np.zeros((4, steps, nodes), bool)
    for time in range(steps):
        if time:
            sent[time] = arrived[time - 1]
        if time < fed_steps:
            sent[time, inputs] = True
        arrived[time, targets[sent[time, sources]]] = True
    for time in reversed(range(steps)):
        if time < steps - 1:
            counted[time] = onward[time + 1]
        if time == steps - 1 or read_every_step:
            counted[time, outputs] = True
        onward[time, sources[counted[time, targets]]] = True
    read = arrived if read_every_step else arrived[-1:]
    fed, used = np.asarray(read.any(0)), np.asarray(onward[:fed_steps].any(0))
    return Liveness(sources, targets, sent, onward, arrived, counted, fed, used)


def reached(start: np.ndarray, sources: np.ndarray, targets: np.ndarray, nodes: int) -> np.ndarray:
    """The nodes that can be reached from ``start`` along edges, those of ``start`` included; boolean, (nodes,)."""
    seen = _ends(start, nodes)
    while len(found := targets[seen[sources] & ~seen[targets]]):
        seen[found] = True
    return seen


def _ends(numbers: np.ndarray, nodes: int) -> np.ndarray:
    mask = np.zeros(nodes, bool)
    mask[numbers] = True
    return mask
