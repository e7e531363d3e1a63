"""Translate with a `Seq2Seq` model: beam search, of which greedy search is the case of one beam.

Each step computes one position for all sentences and beams; keys and values of earlier positions are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wirings.errors import WiringError
from wirings.models.seq2seq import END, PAD, START, Past, Seq2Seq
from wirings.utils.checks import check_int, check_number
from wirings.utils.text import brief


def check_search(where: str, beams: int, penalty: float) -> None:
    """Raise, in the name of ``where``, unless these are options of `beam_search`."""
    check_int(where, "beams", beams, most=10_000)
    check_number(where, "penalty", penalty, least=-1e3, most=1e3)


@torch.no_grad()
def beam_search(model: Seq2Seq, source: Tensor, *, beams: int = 1, penalty: float = 1.0, longest: int = 50) -> Tensor:
    """Find likely translations.

    A finished translation stays among the beams, so that others can replace it. Beams are ranked by their log
    probability divided by ((5 + length) / 6) ** ``penalty`` (Wu and others, 2016).

    Args:
        model: The model, in evaluation mode.
        source: Source tokens, int64 (batch, length), padded at the end.
        beams: Number of translations of a sentence that are followed at the same time; 1 is greedy search.
        penalty: How much to favour long translations; 0 ranks by probability.
        longest: Largest number of tokens of a translation.

    Returns:
        The best translation of every sentence, int64 (batch, at most ``longest``): without `START`, and with `PAD`
        after its `END`. A translation that was cut off has no `END`.
    """
    check_search("beam_search", beams, penalty)
    check_int("beam_search", "longest", longest, most=2**20)
    if not isinstance(source, Tensor) or source.dim() != 2 or source.dtype != torch.int64:
        raise WiringError(f"beam_search expects source tokens, int64 (batch, length), got {brief(source)}.")
    states, mask = model.encode(source)
    mask = mask.repeat_interleave(beams, 0)
    read = [tuple(t.repeat_interleave(beams, 0) for t in both) for both in model.read_source(states)]
    past = [Past() for _ in read]
    sentences, device = len(source), source.device
    first = torch.arange(sentences, device=device)[:, None] * beams  # the row of a sentence's first beam
    tokens = torch.full((sentences * beams, 1), START, device=device)
    # All beams are the same at first, so only one of them counts.
    scores = torch.full((sentences, beams), -torch.inf, device=device)
    scores[:, 0] = 0.0
    done = torch.zeros(sentences, beams, dtype=torch.bool, device=device)
    lengths = torch.zeros(sentences, beams, device=device)

    for position in range(longest):
        x = model.embed(model.target, tokens[:, -1:], position)
        for block, source_read, so_far in zip(model.decoder, read, past, strict=True):
            x = block(x, source_read, mask, so_far)
        logs = model.head(model.decoder_norm(x[:, 0])).float().log_softmax(-1).view(sentences, beams, -1)
        logs[:, :, [PAD, START]] = -torch.inf
        logs.masked_fill_(done[..., None], -torch.inf)
        logs[:, :, PAD].masked_fill_(done, 0.0)  # a finished translation only continues with padding
        totals = scores[..., None] + logs
        lengths = lengths + ~done
        ranks = totals / ((5 + lengths[..., None]) / 6) ** penalty
        chosen = ranks.flatten(1).topk(beams, 1).indices
        beam, token = chosen // logs.shape[2], chosen % logs.shape[2]
        scores, lengths = totals.flatten(1).gather(1, chosen), lengths.gather(1, beam)
        done = done.gather(1, beam) | (token == END)
        rows = (first + beam).flatten()
        tokens = torch.cat([tokens[rows], token.view(-1, 1)], 1)
        for so_far in past:
            so_far.select(rows)
        if done.all():
            break
    best = (scores / ((5 + lengths) / 6) ** penalty).argmax(1, keepdim=True)
    return tokens[(first + best).flatten(), 1:]
