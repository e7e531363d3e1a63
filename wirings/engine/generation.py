"""Generate tokens one at a time, with the keys and values of earlier tokens kept.

A network that was compiled for sequences of T tokens, and in which a token depends on itself and earlier ones only, is
turned into a network for one token: all operations work token by token, except attention, which also reads the keys and
values of the tokens before. Maps that differ from token to token, such as embeddings of positions, become inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wirings.compaction.operation import Operation
from wirings.compaction.operations import (
    Activation,
    Add,
    AddMap,
    Affine,
    Arrange,
    Attention,
    ChannelNorm,
    Concat,
    Conv,
    Embedding,
    Linear,
    Multiply,
    MultiplyMap,
    ScatterChannels,
    SelectChannels,
)
from wirings.compaction.program import Program
from wirings.engine.build import kernels
from wirings.engine.execution_plan import ExecutionPlan
from wirings.engine.memory_layout import LINE
from wirings.engine.operations import supports
from wirings.engine.operations.cached_attention import VALUE_TILE, CachedAttention
from wirings.engine.tune import tune
from wirings.errors import WiringError
from wirings.utils.checks import is_int, is_number
from wirings.utils.text import brief

if TYPE_CHECKING:
    from wirings.engine.engine_model import EngineModel

ALIAS = 128
"""Keys of which as many tokens are kept as a multiple of this get room for more."""
_TOKENWISE = (Activation, Add, Affine, ChannelNorm, Concat, Multiply, ScatterChannels, SelectChannels)
"""Operations that are the same for one token as for many."""


@dataclass(eq=False)
class OneTokenProgram:
    """A network for one token at a time."""

    program: Program
    tables: dict[str, Tensor]
    """Inputs that differ from position to position: (positions, channels)."""
    embeddings: dict[str, Tensor]
    """Inputs that differ from token to token: (tokens, channels)."""
    caches: dict[str, int]
    """Inputs for keys and values, and how many floats each has."""
    attentions: list[Attention]
    """The attentions of the network for many tokens, in the order of the caches."""
    tokens: int
    """The most tokens."""


def one_token_program(program: Program) -> OneTokenProgram:
    """The network for one token that a network for many tokens amounts to.

    Raises:
        WiringError: if the network does more than attention between tokens, or sees later ones.
    """
    if len(program.inputs) != 1 or len(program.outputs) != 1 or not program.notes.get("types"):
        raise WiringError(
            f"generating with a cache needs a network from tokens to one output, got {len(program.inputs)} inputs and "
            f"{len(program.outputs)} outputs. Compile the language model itself, with tokens as its example."
        )
    ((source, (tokens,)),) = program.inputs.items()
    taken = {source, *(o.output for o in program.operations)}
    position = _unused("position", taken)
    inputs: dict[str, tuple[int, ...]] = {position: (1,)}
    names: dict[str, str] = {}  # of tensors that became inputs
    tables: dict[str, Tensor] = {}
    embeddings: dict[str, Tensor] = {}
    caches: dict[str, int] = {}
    attentions: list[Attention] = []
    made: list[Operation] = []
    capacity = -(-tokens // LINE) * LINE
    capacity += LINE * (capacity % ALIAS == 0)  # rows at such distances would compete for the same lines of the cache
    (output,) = program.outputs
    for o in program.operations:
        o = dataclasses.replace(o, inputs=tuple(names.get(name, name) for name in o.inputs))
        if isinstance(o, Embedding) and o.inputs == (source,):
            name = names[o.output] = _unused(f"{o.output}.row", taken)
            inputs[name], embeddings[name] = (o.weight.shape[1],), o.weight.float()
        elif isinstance(o, _TOKENWISE):
            made.append(o)
        elif isinstance(o, Conv) and o.pointwise:
            made.append(Linear(o.output, o.inputs, o.weight.flatten(1), o.bias))
        elif isinstance(o, (AddMap, MultiplyMap)) and o.map.dim() == 2 and o.map.shape[1] == tokens:
            name = _unused(f"{o.output}.row", taken)
            inputs[name], tables[name] = (len(o.map),), o.map.t().contiguous().float()
            kind = Add if isinstance(o, AddMap) else Multiply
            made.append(kind(o.output, (*o.inputs, name)))
        elif isinstance(o, Attention) and o.causal and o.mask is None and len(o.inputs) == 3:
            name = _unused(f"{o.output}.cache", taken)
            caches[name] = (sum(o.sizes) + sum(o.value_sizes)) * capacity + VALUE_TILE * LINE
            inputs[name] = (caches[name],)
            given = (*o.inputs, name, position)
            made.append(CachedAttention(o.output, given, o.sizes, o.value_sizes, o.sharing, o.scale, capacity))
            attentions.append(o)
        elif isinstance(o, Arrange) and o.transposes and o.output == output:
            output = o.inputs[0]
        else:
            raise _not_tokenwise(o)
    if not embeddings:
        raise WiringError("generating with a cache needs a network that begins with an embedding of tokens.")
    one = Program(inputs, made, (output,), {"types": {position: "torch.int64"}})
    return OneTokenProgram(one, tables, embeddings, caches, attentions, tokens)


def _unused(name: str, taken: set[str]) -> str:
    """A name that no tensor of the network has yet."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _not_tokenwise(o: Operation) -> WiringError:
    what = "attention that also sees later tokens" if isinstance(o, Attention) else type(o).__name__
    return WiringError(
        f"this network cannot generate with a cache: {o.output} is {what}, which does not work token by token. Call "
        "the network on the whole sequence instead."
    )


class TokenGenerator:
    """Generates tokens one at a time with a compiled language model; `EngineModel.generator` makes one.

    It keeps the keys and values of the tokens so far, so that a new token costs one token's work. One generator holds
    one sequence: make another one for a second sequence, or call `reset`.

    Args:
        model: the compiled network, for as many tokens as will be generated at most.
    """

    def __init__(self, model: EngineModel) -> None:
        library = kernels() if model.compiled else None
        if library is None:
            raise WiringError("generating with a cache needs the compiled kernels. Call the network itself instead.")
        self._one = one_token_program(model.program)
        program = self._one.program
        shapes = {name: tuple(x.shape[1:]) for name, x in program.values(*program.zeros(1)).items()}
        for o in program.operations:
            if not supports(o, shapes) and not isinstance(o, Affine):  # for one token, its kernel is used here only
                raise WiringError(
                    f"this network cannot generate with a cache: the kernels cannot compute {o.output} "
                    f"({type(o).__name__}) for one token. Call the network on the whole sequence instead."
                )
        self._plan = ExecutionPlan(library, program, shapes, model.threads, quantization=model.quantization)
        self.tokens = self._one.tokens
        """The most tokens that a sequence can have."""
        self._caches = {name: torch.zeros(1, size) for name, size in self._one.caches.items()}
        self._position = torch.zeros(1, 1, dtype=torch.int64)
        self._classes = min(len(table) for table in self._one.embeddings.values())
        self._count = 0
        tune(self._plan, self._inputs(0), seconds=1.0)

    @property
    def count(self) -> int:
        """The number of tokens so far."""
        return self._count

    def reset(self) -> None:
        """Forget all tokens."""
        self._count = 0

    def _inputs(self, token: int) -> list[Tensor]:
        given: list[Tensor] = []
        for name in self._one.program.inputs:
            if name in self._one.embeddings:
                given.append(self._one.embeddings[name][token : token + 1])
            elif name in self._one.tables:
                given.append(self._one.tables[name][self._count : self._count + 1])
            else:
                given.append(self._caches.get(name, self._position))
        return given

    @torch.no_grad()
    def step(self, token: int) -> Tensor:
        """Add a token; returns the network's output for it, such as the logits of the next token: (classes,)."""
        if self._count >= self.tokens:
            raise WiringError(
                f"this network was compiled for {self.tokens:,} tokens, and all of them are used. Compile it for more, "
                "or call reset()."
            )
        if not is_int(token) or not 0 <= token < self._classes:
            raise WiringError(f"this network expects tokens from 0 to {self._classes - 1:,}, got {brief(token)}.")
        self._position[0, 0] = self._count
        (result,) = self._plan.run(self._inputs(token))
        self._count += 1
        return result[0]

    def add(self, tokens: Iterable[int] | Tensor) -> Tensor:
        """Add several tokens; returns the network's output for the last one."""
        result: Tensor | None = None
        if not isinstance(tokens, Iterable) or (isinstance(tokens, Tensor) and tokens.is_meta):
            raise WiringError(f"add expects tokens, integers in a list or a tensor, got {brief(tokens)}.")
        for token in tokens.flatten().tolist() if isinstance(tokens, Tensor) else tokens:
            result = self.step(token)
        if result is None:
            raise WiringError("add expects at least one token, got none.")
        return result

    def generate(
        self,
        prompt: Iterable[int] | Tensor,
        length: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[int]:
        """Add a prompt, then draw tokens one by one. The last one that is drawn is not added: `step` does that.

        Args:
            prompt: the tokens to continue, at least one.
            length: the number of tokens to draw.
            temperature: above 1 for more varied tokens, 0 for the most likely ones.
            top_k: draw from this many of the most likely tokens only.
            generator: the source of random numbers.

        Returns:
            An iterator over the tokens, each of which is drawn when it is asked for.
        """
        if not (is_number(temperature) and temperature >= 0) or not (top_k is None or (is_int(top_k) and top_k > 0)):
            got = f"{brief(temperature)} and {brief(top_k)}"
            raise WiringError(f"generate expects a temperature of 0 or more and a top_k of 1 or more, got {got}.")
        if not is_int(length) or length < 0:
            raise WiringError(f"generate expects a length of 0 or more, got {brief(length)}.")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise WiringError(f"generate expects a torch.Generator or None as generator, got {brief(generator)}.")
        return self._drawn(prompt, length, temperature, top_k, generator)

    def _drawn(
        self,
        prompt: Iterable[int] | Tensor,
        length: int,
        temperature: float,
        top_k: int | None,
        generator: torch.Generator | None,
    ) -> Iterator[int]:
        logits = self.add(prompt)
        for number in range(length):
            token = _draw(logits, temperature, top_k, generator)
            yield token
            if number + 1 < length:
                logits = self.step(token)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # Differences from the largest logit, since that divided by a tiny temperature would be infinite.
    weights = ((logits - logits.max()) / float(min(max(temperature, 1e-30), 1e30))).softmax(0)
    return int(torch.multinomial(weights, 1, generator=generator))
