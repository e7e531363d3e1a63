"""The blocks of a transformer, found by the names and shapes of its weights: attention, its heads, and the MLP.

No class of any library is known here. A weight is a query, key or value projection if its name says so (``q_proj``,
``query``, ``to_qkv``) or if it has three times as many outputs as inputs inside something called attention; the other
kinds follow from their shapes. Histories store names and shapes, so blocks are found in old files, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

_LETTERS = {
    **dict.fromkeys(("q", "wq", "query", "queries"), "q"),
    **dict.fromkeys(("k", "wk", "key", "keys"), "k"),
    **dict.fromkeys(("v", "wv", "value", "values"), "v"),
    **dict.fromkeys(("kv", "wkv"), "kv"),
    **dict.fromkeys(("qkv", "wqkv"), "qkv"),
}
_OUTPUT_WORDS = {"o", "wo", "out", "output", "proj", "dense"}
_CROSS_WORDS = re.compile("cross|enc|src|memory|context", re.IGNORECASE)
QUERY, KEY, VALUE, OUTPUT = "q", "k", "v", "out"
MLP, OTHER = "MLP", "other"


class WeightMatrix(NamedTuple):
    """A weight matrix: its name, and its numbers of outputs and inputs (0 if it is not a matrix)."""

    name: str
    gives: int
    takes: int
    edges: int
    experts: int = 1
    """The number of matrices of this shape that the weight holds."""
    flip: bool = False
    """Whether its first dimension is that of the inputs."""


class GridCell(NamedTuple):
    """Weights of one kind in one block: a cell of the grid that has a row per block and a column per kind."""

    block: int
    column: tuple[str, str]
    """Family and kind, such as ``("attention", "q")`` or ``("MLP", "in")``."""
    parts: list[tuple[int, np.ndarray | None]]
    """Indices of layers; with each, the outputs that belong to the cell, or None for all of them."""
    edges: int
    """The number of possible edges."""


class AttentionLayer(NamedTuple):
    """An attention of a block: where its projections are, and how many heads it has."""

    block: int
    family: str
    parts: dict[str, tuple[int, np.ndarray]]
    """For each of ``q``, ``k``, ``v`` and ``out`` that is wired: the layer and its outputs; for ``out``, its inputs."""
    query_layer: int
    heads: int
    """0 if unknown."""
    key_heads: int
    """The number of heads of keys and values, each of which serves several queries if there are fewer of them."""


class Transformer(NamedTuple):
    """The blocks of a transformer."""

    blocks: list[str]
    """Names, such as ``block 0`` or ``encoder 0``."""
    columns: list[tuple[str, str]]
    cells: list[GridCell]
    attentions: list[AttentionLayer]
    outside: list[int]
    """The layers that are in no block, such as the classifier."""


def find_transformer(matrices: Sequence[WeightMatrix], heads: Mapping[str, int]) -> Transformer | None:
    """Find the blocks of a transformer.

    Args:
        matrices: the wired weights in the order of the model.
        heads: the number of heads by the name of the weight that holds the queries, as far as it is known.

    Returns:
        The blocks; None if there is no attention, or only a little within a network of another kind.
    """
    paths = [_path(matrix.name) for matrix in matrices]
    groups = _attention_groups(matrices, paths)
    if not groups:
        return None
    by_block: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for prefix in groups:
        by_block.setdefault(_block_of(prefix, groups, paths), []).append(prefix)
    cells: list[GridCell] = []
    attentions: list[AttentionLayer] = []
    inside: set[int] = set()
    for number, (block, prefixes) in enumerate(by_block.items()):
        own = [i for i, path in enumerate(paths) if path[: len(block)] == block and i not in inside]
        inside.update(own)
        left = [i for i in own if all(i not in groups[prefix] for prefix in prefixes)]
        for order, prefix in enumerate(prefixes):
            found = _Projections(matrices, paths, groups[prefix])
            output = _output_of(prefix, block, left, matrices, paths, found.width)
            left = [i for i in left if i != output]
            family = _family(order, prefix[len(block) :], prefixes[0][len(block) :])
            attentions.append(found.attention(number, family, output, heads))
            cells += _attention_cells(number, attentions[-1], matrices, found.parts)
        width = matrices[attentions[-1].query_layer].takes
        cells += _mlp_cells(number, left, matrices, paths, width)
    known = sum(cell.edges for cell in cells if cell.column[0] != OTHER)
    convolutions = sum(matrix.edges for matrix in matrices if not matrix.gives)
    if known <= convolutions or (len(by_block) == 1 and 2 * known <= sum(matrix.edges for matrix in matrices)):
        return None
    present = {cell.column for cell in cells}
    families = list(dict.fromkeys(cell.column[0] for cell in cells if cell.column[0] not in (MLP, OTHER)))
    order_ = [(family, kind) for family in families for kind in (QUERY, KEY, VALUE, OUTPUT)]
    order_ += [(MLP, "gate"), (MLP, "in"), (MLP, "out"), (OTHER, "")]
    columns = [column for column in order_ if column in present]
    outside = [i for i in range(len(matrices)) if i not in inside]
    return Transformer(_block_names(list(by_block)), columns, cells, attentions, outside)


def column_name(family: str, kind: str) -> str:
    """The name of a column of the grid.

    >>> column_name("attention", "q"), column_name("cross-attention", "q"), column_name("MLP", "in")
    ('q', 'cross q', 'MLP in')
    """
    if family == "attention":
        return kind
    return f"{family.removesuffix('-attention')} {kind}".strip()


def _path(name: str) -> tuple[str, ...]:
    """The parts of a weight's name, without the word weight.

    >>> _path("h.0.attn.c_attn.weight"), _path("layers.0.self_attn.in_proj_weight")
    (('h', '0', 'attn', 'c_attn'), ('layers', '0', 'self_attn', 'in_proj'))
    """
    return tuple(re.sub(r"[._]?weight$", "", name).split("."))


def _words(path: tuple[str, ...]) -> list[str]:
    """The lower-case words of the last part of a path that is not a number."""
    last = next((part for part in reversed(path) if not part.isdigit()), "")
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", last)]


def _letters(path: tuple[str, ...], matrix: WeightMatrix) -> str:
    """Which of q, k and v a weight projects to; empty if it is no such projection."""
    if not matrix.gives or matrix.experts > 1:
        return ""
    found = "".join(_LETTERS.get(word, "") for word in _words(path))
    if found or not any("att" in part.lower() for part in path[-2:]):
        return found if found in ("q", "k", "v", "kv", "qkv") else ""
    return {3 * matrix.takes: "qkv", 2 * matrix.takes: "kv"}.get(matrix.gives, "")


def _attention_groups(
    matrices: Sequence[WeightMatrix], paths: list[tuple[str, ...]]
) -> dict[tuple[str, ...], dict[int, str]]:
    """The query, key and value projections, by the path of the module that they are in."""
    groups: dict[tuple[str, ...], dict[int, str]] = {}
    for i, (path, matrix) in enumerate(zip(paths, matrices, strict=True)):
        if letters := _letters(path, matrix):
            groups.setdefault(path[:-1], {})[i] = letters
    return {
        prefix: found
        for prefix, found in groups.items()
        if {"q", "k"} <= set("".join(found.values())) or {"v"} <= set("".join(found.values()))
    }


def _block_of(
    prefix: tuple[str, ...], groups: Mapping[tuple[str, ...], Mapping[int, str]], paths: list[tuple[str, ...]]
) -> tuple[str, ...]:
    """The path of an attention's block: the smallest numbered module around it that has more layers than attention."""
    numbered = [prefix[:n] for n in range(len(prefix), 0, -1) if prefix[n - 1].isdigit()]
    projections = {i for found in groups.values() for i in found}
    for around in numbered:
        others = [i for i, path in enumerate(paths) if path[: len(around)] == around and i not in projections]
        if len(others) > sum(group[: len(around)] == around for group in groups):
            return around
    return numbered[0] if numbered else prefix[:-1]


def _output_of(
    prefix: tuple[str, ...],
    block: tuple[str, ...],
    left: list[int],
    matrices: Sequence[WeightMatrix],
    paths: list[tuple[str, ...]],
    width: int,
) -> int | None:
    """The output projection of an attention: near it, with as many inputs as its heads have outputs together.

    In the attention's own module, the name alone is enough: heads may have values of another size than their queries,
    and queries of low rank two weights (DeepSeek).
    """
    for length in range(len(prefix), len(block) - 1, -1):
        near = [i for i in left if paths[i][:length] == prefix[:length]]
        fits = [i for i in near if not width or matrices[i].takes == width]
        called = [i for i in near if set(_words(paths[i])) & _OUTPUT_WORDS]
        if length > len(block):
            found = fits or (called if length == len(prefix) else [])
        else:
            found = [i for i in fits if i in called]
        if found:
            return found[0]
    return None


def _family(order: int, name: tuple[str, ...], first: tuple[str, ...]) -> str:
    """What an attention of a block is called, given its path in the block and that of the block's first attention."""
    if order == 0:
        return "attention"
    cross = _CROSS_WORDS.search(".".join(name)) or (order == 1 and "self" in ".".join(first).lower())
    return "cross-attention" if cross else f"attention {order + 1}"


class _Projections:
    """The query, key and value projections of one attention, and how fused ones are split."""

    def __init__(
        self, matrices: Sequence[WeightMatrix], paths: list[tuple[str, ...]], found: Mapping[int, str]
    ) -> None:
        self.matrices = matrices
        letters = dict(found)
        if "q" in letters.values():  # beside queries of its own, a fused projection has keys and values
            letters = {i: "kv" if text == "qkv" else text for i, text in letters.items()}
        self.letters = letters
        fused = [i for i, text in letters.items() if text == "qkv"]
        self.by_head = bool(fused) and "key" in _words(paths[fused[0]])  # query_key_value is ordered head by head
        self.query_layer = next((i for i, text in letters.items() if "q" in text), next(iter(letters)))
        query = matrices[self.query_layer]
        thirds = letters[self.query_layer] == "qkv" and query.gives == 3 * query.takes
        self.width = query.gives // 3 if thirds else query.gives if letters[self.query_layer] == "q" else 0
        """The number of outputs of all heads together; 0 if unknown."""
        self.parts: dict[str, list[tuple[int, np.ndarray | None]]] = {}

    def attention(self, block: int, family: str, output: int | None, heads: Mapping[str, int]) -> AttentionLayer:
        """The attention with the parts of its projections, split as its number of heads says."""
        count = heads.get(self.matrices[self.query_layer].name, 0)
        width = self.width or (self.matrices[output].takes if output is not None else 0)
        size = width // count if count and width % count == 0 else 0
        units: dict[str, tuple[int, np.ndarray]] = {}
        for i, text in self.letters.items():
            gives = self.matrices[i].gives
            for letter, own in self._split(text, gives, width, size).items():
                units[letter] = i, own
                self.parts.setdefault(letter, []).append((i, own if len(text) > 1 else None))
            if len(text) > 1 and not any(part[0] == i for parts in self.parts.values() for part in parts):
                self.parts.setdefault(QUERY, []).append((i, None))  # cannot be split: shown as a whole
        if output is not None:
            units[OUTPUT] = output, np.arange(self.matrices[output].takes)
            self.parts[OUTPUT] = [(output, None)]
        keys = len(units[KEY][1]) if KEY in units else len(units[VALUE][1]) if VALUE in units else width
        known = size > 0 and keys % size == 0 and all(len(own) in (width, keys) for _, own in units.values())
        heads_, key_heads = (count, keys // size) if known else (0, 0)
        if key_heads and count % key_heads:
            heads_ = key_heads = 0
        return AttentionLayer(block, family, units, self.query_layer, heads_, key_heads)

    def _split(self, text: str, gives: int, width: int, size: int) -> dict[str, np.ndarray]:
        """The outputs of a projection that are queries, keys and values; empty if that is not known."""
        outputs = np.arange(gives)
        if len(text) == 1:
            return {text: outputs}
        if text == "kv":
            return {"k": outputs[: gives // 2], "v": outputs[gives // 2 :]}
        keys = (gives - width) // 2
        if not width or keys < 1 or width + 2 * keys != gives:
            return {}
        if not self.by_head:
            return {"q": outputs[:width], "k": outputs[width : width + keys], "v": outputs[width + keys :]}
        if not size or keys % size or width % keys:
            return {}
        each = outputs.reshape(keys // size, -1, size)  # for each head of keys: its queries, the keys, the values
        return {"q": each[:, :-2].reshape(-1), "k": each[:, -2].reshape(-1), "v": each[:, -1].reshape(-1)}


def _attention_cells(
    block: int,
    attention: AttentionLayer,
    matrices: Sequence[WeightMatrix],
    parts: Mapping[str, list[tuple[int, np.ndarray | None]]],
) -> list[GridCell]:
    return [_cell(block, (attention.family, kind), own, matrices) for kind, own in parts.items()]


def _cell(
    block: int, column: tuple[str, str], parts: list[tuple[int, np.ndarray | None]], matrices: Sequence[WeightMatrix]
) -> GridCell:
    edges = sum(matrices[i].edges if own is None else len(own) * matrices[i].takes for i, own in parts)
    return GridCell(block, column, parts, edges)


def _mlp_cells(
    block: int, left: list[int], matrices: Sequence[WeightMatrix], paths: list[tuple[str, ...]], width: int
) -> list[GridCell]:
    """The cells of the layers of a block that are not attention: into the MLP, out of it, and others."""
    kinds: dict[tuple[str, str], list[tuple[int, np.ndarray | None]]] = {}
    hidden = {matrices[i].takes for i in left if matrices[i].gives == width}
    squares = [i for i in left if matrices[i].gives == matrices[i].takes == width]
    for i in left:
        matrix, words = matrices[i], set(_words(paths[i]))
        down = i in squares[1:][-1:] if matrix.gives == matrix.takes else matrix.gives == width
        up = matrix.takes == width and (matrix.gives >= width or matrix.gives in hidden)
        if matrix.experts > 1:  # which dimension is the output differs from model to model
            down = bool(words & {"down", "out", "output", "2"})
            up = not down
        column = (OTHER, "")
        if down:
            column = (MLP, "out")
        elif up:
            column = (MLP, "gate" if "gate" in words and "up" not in words else "in")
        kinds.setdefault(column, []).append((i, None))
    return [_cell(block, column, parts, matrices) for column, parts in kinds.items()]


def _block_names(blocks: list[tuple[str, ...]]) -> list[str]:
    """Short names of blocks: the parts of their paths in which they differ.

    >>> _block_names([("encoder", "block", "0"), ("encoder", "block", "1"), ("decoder", "block", "0")])
    ['encoder 0', 'encoder 1', 'decoder 0']
    >>> _block_names([("h", "0"), ("h", "1")])
    ['block 0', 'block 1']
    """
    if len({len(block) for block in blocks}) > 1:
        return [".".join(block) for block in blocks]
    differs = [len(set(parts)) > 1 for parts in zip(*blocks, strict=True)]
    names = [" ".join(part for part, keep in zip(block, differs, strict=True) if keep) for block in blocks]
    if len(blocks) == 1:
        names = [next((part for part in reversed(blocks[0]) if part.isdigit()), "0")]
    return [f"block {name.replace(' ', '.')}" if name[:1].isdigit() else name for name in names]
