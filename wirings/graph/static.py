"""Static graphs: every node has one state, computed once from those of its parents."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from wirings.budgets.budget import Amount
from wirings.errors import WiringError
from wirings.graph.base import Graph, NodeSelection, make_topology
from wirings.graph.nodes import Convolutions, Groups, NodeFunction, NodeRecipe, build
from wirings.graph.nodes.conv import note_statistics
from wirings.graph.product import Product, split, through
from wirings.graph.topology import Blocks, LevelGroup, Topology
from wirings.rules import Rule
from wirings.selection.structure import FREE
from wirings.utils.transforms import in_transform


class NodeLevel(NamedTuple):
    """Nodes of a static graph that are computed at once, and their function."""

    nodes: np.ndarray
    """Their numbers in the graph."""
    function: NodeFunction
    part: slice | None
    """Which of the function's nodes they are; None for all."""


class StaticGraph(Graph):
    """A static neural graph (section 2.1 of the paper): no cycles, and one state for each node.

    Called with the states of its input nodes, (batch, inputs, …), it returns those of its output nodes,
    (batch, outputs, …). The modules before and after it, the paper's g and h, compute the former from your data and
    predictions from the latter.

    Nodes are computed in the order ``order``, in which the parameters of their functions are stored as well; with
    blocks or a `Dag` it is 0, 1, 2, ….

    Args:
        blocks: the number of nodes in each block, or a `Blocks`. The first block is the input, the last the output. Any
            block may feed any later one, so the longest path has one edge less than there are blocks.
        topology: instead of blocks, a `Dag`, or a boolean matrix of the allowed edges, [receives, sends].
        edges: the number of real edges, or their density as a float. None: all allowed edges, and no rule.
        node: the nodes' functions (see `wirings.graph.nodes`); with blocks, optionally a list with one for each block.
        rule: a rule or its name; dnw by default if ``edges`` is given.
        structure: which edges are real together, as for `wirings.wire_`: blocks of receiving × sending nodes, ``"row"``
            or ``"column"`` for all edges that lead to a node or leave it, or N:M, which needs no ``edges``.
        inputs: with a matrix, the input nodes: how many (the first ones) or a list of their numbers.
        outputs: with a `Dag` or a matrix, the output nodes: how many (the last ones) or a list of their numbers.

    >>> from wirings.graph import ActivationNode
    >>> graph = StaticGraph([4, 8, 8, 3], edges=40, node=ActivationNode("relu", bias=True))
    >>> graph(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    _gather: Tensor | None

    def __init__(
        self,
        blocks: Sequence[int] | Blocks | None = None,
        *,
        topology: Topology | Tensor | None = None,
        edges: Amount | None = None,
        node: NodeRecipe | Sequence[NodeRecipe | None] | None = None,
        rule: str | Rule | None = None,
        structure: str = FREE,
        inputs: NodeSelection | None = None,
        outputs: NodeSelection | None = None,
    ) -> None:
        super().__init__(make_topology("StaticGraph", blocks=blocks, topology=topology), inputs, outputs)
        order, self.groups = self.topology.groups(self.inputs, self._kind)
        self._given = {
            "blocks": blocks if isinstance(blocks, Blocks) or blocks is None else list(blocks),
            "topology": None if topology is None else self.topology,
            "edges": edges,
            "node": node,
            "rule": rule,
            "inputs": inputs,
            "outputs": outputs,
        }
        self.order, self.position = order, np.argsort(order)
        levels = [level for group in self.groups for level in group.levels]
        self.functions = nn.ModuleList()
        self._function_of = self._build_functions(node, levels)
        self._kept = self._levels_of_outputs(levels)
        self.far, self.near = (self._products(which) for which in ("far", "near"))
        tiles = [tile for group in self.groups for tile in (group.far, group.near) if tile is not None]
        self._finish(tiles, edges, rule, structure)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x, 1, "(batch, inputs, …)")
        if (functions := self._block_functions(x.transpose(0, 1))) is not None:
            return self._run_blocks(x.transpose(0, 1), functions)
        far, near = self._matrices()
        messages: list[Tensor] = []  # what each group sends, (nodes, batch, …)
        kept: list[Tensor] = []  # the states of levels that contain outputs
        level = 0
        for i, group in enumerate(self.groups):
            received = self._receive_far(i, group, far, messages) if i else x.transpose(0, 1)
            sent: list[Tensor] = []
            for start, stop in group.levels:
                own = received[start - group.start : stop - group.start]
                if i in near and sent:
                    row, sources = start - group.start, self._joined(start, sent)
                    self._check_sizes(start, [own, sources])
                    own = own + through(near[i][row : row + stop - start, :row], sources)
                state, message = self._compute(level, own, first=i == 0)
                if state is not None:
                    kept.append(state)
                if message is not None:
                    sent.append(message)
                level += 1
            if sent:
                messages.append(self._joined(group.start, sent))
        return self._outputs(kept)

    def _block_functions(self, x: Tensor) -> list[Any] | None:
        """The functions of all blocks but the last, if our kernels can compute the graph as one operation, or None."""
        last = len(self.functions) - 1
        if not x.is_cuda or not self._one_operation or torch.compiler.is_compiling() or in_transform(x):
            return None
        parts = ["before", *["between"] * (last - 1)]
        found = [f.block_function(part, x) for f, part in zip(self._convolutions(), parts, strict=True)]
        if any(f is None for f in found) or any(f.stride != 1 for f in found[1:]):
            return None
        single = x.shape[1] == 1 and max(x.shape[2:]) <= found[0].stride  # a norm cannot be trained on one value
        return None if single else found

    @property
    def is_one_operation(self) -> bool:
        """Whether our kernels compute this graph as one operation on a GPU, of maps of any usual precision."""
        return self._one_operation and all(f.has_block_kernels for f in self._convolutions())

    @functools.cached_property
    def _one_operation(self) -> bool:
        """Whether this graph consists of blocks of which all but the last have convolutions as functions."""
        blocks = isinstance(self.topology, Blocks) and len(self.functions) > 1 and not len(self.near)
        products = [self._product(self.far, i) for i in range(1, len(self.groups))] if blocks else []
        convolutions = all(isinstance(f, Convolutions) for f in list(self.functions)[:-1])
        return blocks and convolutions and self._kept == {len(self.functions) - 1} and all(p.full for p in products)

    def _convolutions(self) -> list[Convolutions]:
        return list(self.functions)[:-1]  # type: ignore[return-value]

    def _run_blocks(self, x: Tensor, functions: list[Any]) -> Tensor:
        """The graph as one operation."""
        from wirings.graph import _blocks_cuda

        products = [self._product(self.far, i) for i in range(1, len(self.groups))]
        pairs = zip(products, self.groups[1:], strict=True)
        tiles = [_blocks_cuda.BlockTile(p.start, *p.shape, group.start - p.shape[1]) for p, group in pairs]
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        received, statistics = _blocks_cuda.run(x, self._weight_for(products), tiles, functions, dtype)
        counts = [x[0].numel(), *[received[0].numel()] * (len(functions) - 1)]
        noted = [each for each in zip(self._convolutions(), statistics, counts, strict=True) if each[0].training]
        if noted:
            note_statistics(*zip(*noted, strict=True))
        return self._outputs([self._function(len(functions)).on_rows("after", received, 0.0)])

    def levels(self) -> list[NodeLevel]:
        """The levels in the order in which they are computed, with the function of their nodes."""
        positions = [level for group in self.groups for level in group.levels]
        return [
            NodeLevel(self.order[start:stop], self._function(number), part)
            for (start, stop), (number, part) in zip(positions, self._function_of, strict=True)
        ]

    def _matrices(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The weights of the far and of the near tiles, by group."""
        places = [(made, int(i)) for made in (self.far, self.near) for i in made]
        products = [self._product(made, i) for made, i in places]
        far: dict[int, Tensor] = {}
        near: dict[int, Tensor] = {}
        parts = split(self._weight_for(products), products)
        for (made, i), product, own in zip(places, products, parts, strict=True):
            (far if made is self.far else near)[i] = product.matrix(own)
        return far, near

    def _receive_far(self, i: int, group: LevelGroup, far: dict[int, Tensor], messages: list[Tensor]) -> Tensor:
        """What a group receives from all earlier groups."""
        count = group.stop - group.start
        if group.far is None:
            return messages[-1].new_zeros(count, *messages[-1].shape[1:])
        product = self._product(self.far, i)
        # A tile's sources are the nodes right before the group: all of them, or those within the blocks' reach.
        missing = product.shape[1]
        sources: list[Tensor] = []
        for message in reversed(messages):
            if missing == 0:
                break
            sources.insert(0, message)
            missing -= len(message)
        return product(far[i], self._joined(group.start, sources))

    def _joined(self, position: int, pieces: list[Tensor]) -> Tensor:
        """Concatenate what several levels send to the node at this position of the order."""
        if len(pieces) == 1:
            return pieces[0]
        self._check_sizes(position, pieces)
        return torch.cat(pieces)

    def _check_sizes(self, position: int, pieces: list[Tensor]) -> None:
        """Raise an error if the node at this position would have to add maps of different sizes."""
        if any(piece.shape[2:] != pieces[0].shape[2:] for piece in pieces):
            sizes = " and ".join(sorted({"×".join(map(str, piece.shape[2:])) for piece in pieces}))
            raise WiringError(
                f"{self._kind}: {self._name(position)} receives maps of different sizes, {sizes}, which cannot "
                "be added. Give only the input nodes a stride, or use Blocks(…, reach=1)."
            )

    def _compute(self, level: int, received: Tensor, first: bool) -> tuple[Tensor | None, Tensor | None]:
        """The states of a level, if they contain outputs, and what it sends, unless it is the last."""
        function, nodes = self._function_of[level]
        call: dict[str, Any] = {} if nodes is None else {"nodes": nodes}
        module = self._function(function)
        keep, last = level in self._kept, level == len(self._function_of) - 1
        state = message = None
        if first or keep:
            state = received if first else module.on_rows("after", received, 0.0, **call)
        if not last:
            if state is None:
                message = module.on_rows("between", received, 0.0, 0.0, **call)
            else:
                message = module.on_rows("before", state, 0.0, **call)
        for made in (state, message):
            if made is not None and len(made) != len(received):
                raise WiringError(
                    f"{self._kind}: node= returned {len(made)} nodes for {len(received)}; it must keep them."
                )
        return (state if keep else None), message

    def _outputs(self, kept: list[Tensor]) -> Tensor:
        if any(state.shape[2:] != kept[0].shape[2:] for state in kept):
            sizes = ", ".join("×".join(map(str, state.shape[2:])) for state in kept)
            raise WiringError(f"{self._kind}: the output nodes have maps of different sizes, {sizes}.")
        states = torch.cat(kept) if len(kept) > 1 else kept[0]
        return (states if self._gather is None else states[self._gather]).transpose(0, 1)

    # ---- construction ------------------------------------------------------------------------------------------------

    def _build_functions(self, node: Any, levels: list[tuple[int, int]]) -> list[tuple[int, slice | None]]:
        """Make the nodes' functions; return, for each level, the number of its function and which of its nodes."""
        if isinstance(self.topology, Blocks):
            recipes = list(node) if _is_list(node) else [node] * len(levels)
            if len(recipes) != len(levels):
                raise WiringError(
                    f"{self._kind}: node= has {len(recipes)} recipes for {len(levels)} blocks; give one for each, "
                    "or one for all."
                )
            for j, (recipe, (start, stop)) in enumerate(zip(recipes, levels, strict=True)):
                made = build(recipe, stop - start, self._kind, sends=j < len(levels) - 1, receives=j > 0)
                self.functions.append(made)
            return [(j, None) for j in range(len(levels))]
        if _is_list(node):
            raise WiringError(
                f"{self._kind}: a list of recipes in node= needs blocks; give one recipe for all nodes, or Groups."
            )
        first = levels[0][1]
        if isinstance(node, Groups):  # its counts are those of all nodes
            self.functions.append(build(node, self.nodes, self._kind))
            if not self._function(0).some_nodes:
                raise WiringError(
                    f"{self._kind}: without blocks, nodes are computed one by one, so Groups can only contain kinds "
                    "that support it (PlainNode, ActivationNode, ConvNode without batch norm). Use blocks, with a "
                    "recipe for each."
                )
            return [(0, slice(start, stop)) for start, stop in levels]
        self.functions.append(build(node, first, self._kind, receives=False))
        with torch.random.fork_rng(devices=[]):  # only to find out whether one function can serve all levels
            one_for_all = build(node, 1, self._kind).some_nodes
        if one_for_all:
            self.functions.append(build(node, self.nodes - first, self._kind))
            return [(0, None), *((1, slice(start - first, stop - first)) for start, stop in levels[1:])]
        self.functions.extend(build(node, stop - start, self._kind) for start, stop in levels[1:])
        return [(j, None) for j in range(len(levels))]

    def _function(self, i: int) -> NodeFunction:
        return self.functions[i]  # type: ignore[return-value]

    def _levels_of_outputs(self, levels: list[tuple[int, int]]) -> set[int]:
        """The levels that contain output nodes; ``_gather`` says where these lie in the states of those levels."""
        wanted = self.position[self.outputs]
        kept = [j for j, (start, stop) in enumerate(levels) if ((wanted >= start) & (wanted < stop)).any()]
        at = np.concatenate([np.arange(*levels[j]) for j in kept])
        gather = None if np.array_equal(at, wanted) else torch.from_numpy(np.searchsorted(at, wanted))
        self.register_buffer("_gather", gather, persistent=False)
        return set(kept)

    def _product(self, products: nn.ModuleDict, i: int) -> Product:
        return products[str(i)]  # type: ignore[return-value]

    def _products(self, which: str) -> nn.ModuleDict:
        tiles = {str(i): getattr(group, which) for i, group in enumerate(self.groups)}
        return nn.ModuleDict(
            {name: Product(tile, dense=which == "near") for name, tile in tiles.items() if tile is not None}
        )

    def _name(self, position: int) -> str:
        if isinstance(self.topology, Blocks):
            return f"block {next(i for i, group in enumerate(self.groups) if group.stop > position)}"
        return f"node {self.order[position]}"


def _is_list(node: Any) -> bool:
    """Whether ``node=`` is a list of recipes rather than one of them."""
    return isinstance(node, Sequence) and not isinstance(node, str)
