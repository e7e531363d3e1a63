"""Simplify a program without changing its outputs: fold norms into their neighbours, remove what does nothing.

A batch norm in evaluation is an affine operation. It is folded back into the sum before it, or forward into the sums
after it; a shift before a zero-padded convolution becomes a constant map, since the padding is not shifted. An affine
operation with neither, such as a norm between two activations, stays. What a kind of operation absorbs, and how, is
defined by its own methods.
"""

from __future__ import annotations

from wirings.compaction.operation import Operation
from wirings.compaction.operations import Affine, WeightedSum
from wirings.compaction.program import Program
from wirings.compaction.rewriter import ProgramRewriter


def fold(program: Program) -> Program:
    """The simplified program. Its weights must be in double precision."""
    return ProgramRewriter(program).run((_remove_identity, _simplify, fold_affine_back, fold_affine_forward))


def _remove_identity(rewriter: ProgramRewriter, o: Operation) -> bool:
    if not o.is_identity(rewriter.shapes) or (o.output in rewriter.outputs and o.inputs[0] in rewriter.program.inputs):
        return False
    rewriter.remove(o.output, o.inputs[0])
    return True


def _simplify(rewriter: ProgramRewriter, o: Operation) -> bool:
    return o.simplify(rewriter)


def fold_affine_back(rewriter: ProgramRewriter, o: Operation) -> bool:
    """Fold an affine operation into what precedes it."""
    before = rewriter.sole_producer(o.inputs[0]) if isinstance(o, Affine) else None
    if before is None or not isinstance(o, Affine) or rewriter.is_tied(before):
        return False
    return before.absorb_affine(rewriter, o)


def fold_affine_forward(rewriter: ProgramRewriter, o: Operation) -> bool:
    """Fold an affine operation into the sums that follow it, or move it past what follows it."""
    if not isinstance(o, Affine) or not (readers := rewriter.readers(o.output)):
        return False
    sums = [reader for reader in readers if isinstance(reader, WeightedSum)]
    if any(map(rewriter.is_tied, sums)):
        return False
    if len(sums) == len(readers):
        for reader in sums:
            reader.absorb_affine_before(rewriter, o)
        rewriter.remove(o.output, o.inputs[0])
        return True
    repeats = readers[0].affine_repeats(rewriter.shapes[readers[0].inputs[0]]) if len(readers) == 1 else 0
    if repeats:
        changes = {"scale": o.scale.repeat_interleave(repeats), "shift": o.shift.repeat_interleave(repeats)}
        rewriter.swap(o, readers[0], changes)
    return repeats > 0
