"""The translation transformer and its beam search."""

from typing import Any

import pytest
import torch
from torch import Tensor

import wirings
from wirings import WiringError, models
from wirings.models import beam_search
from wirings.models.seq2seq import END, PAD, START, Seq2Seq

SMALL: dict[str, Any] = {"classes": 11, "layers": 2, "width": 16, "heads": 2, "hidden": 32, "length": 12}


def small(**options: Any) -> Seq2Seq:
    torch.manual_seed(0)
    model: Any = models.get("seq2seq", **{**SMALL, **options})
    return model.eval()


def pairs(*rows: tuple[list[int], list[int]]) -> Tensor:
    length = max(len(side) for row in rows for side in row)
    return torch.tensor([[side + [PAD] * (length - len(side)) for side in row] for row in rows])


def test_the_linear_layers_of_the_blocks_are_wired() -> None:
    model: Any = small(rule="dnw", density=0.25)
    names = [report.name for report in model.wiring.look()]
    assert len(names) == 2 * (4 + 2) + 2 * (8 + 2)
    assert all(name.startswith(("encoder.", "decoder.")) for name in names)
    assert {"encoder.0.attention.query.weight", "decoder.1.cross.value.weight"} < set(names)


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_decoder_sees_the_source_and_only_earlier_targets(norm_first: bool) -> None:
    model = small(norm_first=norm_first)
    batch = pairs(([3, 4, 5, END], [START, 6, 7, 8]))
    scores = model(batch)
    assert scores.shape == (1, 4, 11)
    other = batch.clone()
    other[0, 1, 2] = 9
    torch.testing.assert_close(model(other)[:, :2], scores[:, :2])
    assert not torch.allclose(model(other)[:, 2:], scores[:, 2:])
    other = batch.clone()
    other[0, 0, 1] = 9
    assert not torch.allclose(model(other)[:, 0], scores[:, 0])


def test_padding_changes_nothing() -> None:
    model = small()
    alone = model(pairs(([3, END], [START, 6])))
    padded = model(pairs(([3, END], [START, 6]), ([3, 4, 5, END], [START, 6, 7, 8])))
    torch.testing.assert_close(padded[:1, :2], alone)


def test_positions_matter() -> None:
    model = small()
    a, b = model(pairs(([3, 4, END], [START, 6, 7]), ([4, 3, END], [START, 6, 7])))
    assert not torch.allclose(a, b)


def test_tied_embeddings_are_one_weight() -> None:
    tied, free = small(), small(tied=False)
    assert tied.source.weight is tied.head.weight is tied.target.weight
    assert sum(p.numel() for p in free.parameters()) - sum(p.numel() for p in tied.parameters()) == 2 * 11 * 16


def test_a_wired_model_trains_and_is_finalized() -> None:
    model: Any = small(rule="dnw", density=0.2).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    batch = pairs(([3, 4, 5, END], [START, 6, 7, 8]), ([5, END], [START, 9]))
    labels = torch.tensor([[6, 7, 8, END], [9, END, -100, -100]])
    losses = []
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.wiring.step(optimizer)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    before = model.eval()(batch)
    wirings.finalize_(model)
    torch.testing.assert_close(model(batch), before)
    assert beam_search(model, batch[:, 0]).tolist() == [[6, 7, 8, END], [9, END, PAD, PAD]]


def test_greedy_search_takes_the_most_likely_token_every_time() -> None:
    model = small(norm_first=False)
    source = pairs(([3, 4, 5, END], []), ([7, END], []))[:, 0]
    found = beam_search(model, source, longest=6)
    target = torch.full((2, 1), START)
    for position in range(found.shape[1]):
        batch = torch.full((2, 2, 8), PAD)
        batch[:, 0, :4], batch[:, 1, : position + 1] = source, target
        scores = model(batch)[:, position]
        scores[:, [PAD, START]] = -torch.inf
        token = scores.argmax(1)
        token[(target == END).any(1)] = PAD
        target = torch.cat([target, token[:, None]], 1)
    assert torch.equal(found, target[:, 1:])


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_wide_beam_finds_the_best_translation_of_all(penalty: float) -> None:
    model = small(classes=6)
    with torch.no_grad():
        model.head.weight *= 3  # clear preferences
    source = pairs(([3, 4, 5, END], []))[:, 0]
    best, most = None, -torch.inf
    words = [3, 4, 5]
    endings = [[END]] + [[a, END] for a in words] + [[a, b, END] for a in words for b in words]
    endings += [[a, b, c] for a in words for b in words for c in words]
    for translation in endings:
        batch = pairs((source[0].tolist(), [START, *translation[:-1]]))
        logs = model(batch)[0].detach().log_softmax(-1)
        total = sum(logs[i, token].item() for i, token in enumerate(translation))
        rank = total / ((5 + len(translation)) / 6) ** penalty
        if rank > most:
            best, most = translation, rank
    found = beam_search(model, source, beams=64, penalty=penalty, longest=3)
    assert [token for token in found[0].tolist() if token != PAD] == best


def test_rejects_bad_input() -> None:
    model = small()
    with pytest.raises(WiringError, match=r"expected tokens \(batch, 2, length\), got torch.float32 \(1, 3, 8, 8\)"):
        model(torch.zeros(1, 3, 8, 8))
    with pytest.raises(WiringError, match=r"a sentence has at most 12 tokens, got 13\. Set model\.options\.length\."):
        model(torch.ones(1, 2, 13, dtype=torch.int64))
    with pytest.raises(WiringError, match="beams must be a whole number from 1 to 10000, got 0"):
        beam_search(model, torch.ones(1, 3, dtype=torch.int64), beams=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "seq2seq: width must be a multiple of heads, got width = 16 and heads = 3"),
        ({"width": 15, "heads": 3}, "seq2seq: width must be even and a multiple of heads, got 15 and 3"),
        ({"heads": 0}, "seq2seq: heads must be a whole number, at least 1, got 0"),
        ({"layers": -1}, "seq2seq: layers must be a whole number, at least 1, got -1"),
        ({"length": 0}, "seq2seq: length must be a whole number, at least 1, got 0"),
        ({"dropout": 2}, "seq2seq: dropout must be a number of at least 0 and below 1, got 2"),
        ({"attention_dropout": -0.1}, "seq2seq: attention_dropout must be a number of at least 0 and below 1"),
    ],
)
def test_rejects_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WiringError, match=message):
        small(**options)


def test_weights_are_drawn_in_a_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []
    draw = torch.nn.init.normal_

    def spy(weight: Tensor, std: float = 1.0) -> Tensor:
        drawn.append(weight)
        return draw(weight, std=std)

    kept = []  # so that every model has its own memory: an order by address would differ
    for _ in range(8):
        with monkeypatch.context() as watched:
            watched.setattr(torch.nn.init, "normal_", spy)
            kept.append(small(tied=False))
        model = kept[-1]
        assert [id(weight) for weight in drawn[-3:]] == [
            id(layer.weight) for layer in (model.source, model.target, model.head)
        ]


def test_search_keeps_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = small(), []
    encode = model.encode

    def watched(source: Tensor) -> tuple[Tensor, Tensor]:
        states, mask = encode(source)
        seen.append(states.requires_grad)
        return states, mask

    monkeypatch.setattr(model, "encode", watched)
    beam_search(model, torch.tensor([[4, 5, END]]), longest=3)
    assert seen == [False]
