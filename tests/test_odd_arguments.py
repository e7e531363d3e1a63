"""Arguments that used to raise other errors than WiringError, or to take forever; see also `tests.fuzz.arguments`."""

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import wirings
from wirings import WiringError, engine, hub, models, rules
from wirings.history import snapshot_of
from wirings.models.beam_search import beam_search
from wirings.train import data, translations
from wirings.train.data.bleu import bleu
from wirings.train.generate import generate
from wirings.train.saved_runs import open_run

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
ARRAY, META = np.zeros(3), torch.zeros(2, 8, device="meta")


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def prune(batches: Any, model: nn.Module | None = None) -> nn.Module:
    return wirings.prune_(model or plain(), batches, density=0.5)


def ham(**options: Any) -> wirings.HAM:
    return wirings.HAM(torch.optim.SGD(plain().parameters(), lr=0.1), **options)


def search(**options: Any) -> torch.Tensor:
    model = models.get("seq2seq", layers=1, width=16, heads=2, hidden=16, classes=20).eval()
    return beam_search(model, **{"source": torch.full((2, 5), 4), "longest": 3, **options})


def text(folder: Path, **options: Any) -> data.Data:
    (folder / "train.txt").write_text("a b c d " * 100)
    (folder / "val.txt").write_text("a b c d " * 20)
    return data.load("text", **{"directory": folder, "batch": 4, "context": 8, **options})


CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "prune_ without batches": (
        lambda _: prune(None),
        "batches must be an iterable of .* such as a DataLoader, got None",
    ),
    "prune_, another width": (lambda _: prune([X[:, :3]]), "Sequential cannot be run on a batch: mat1 and mat2"),
    "prune_, another dtype": (lambda _: prune([X], plain().half()), "cannot be run on a batch"),
    "prune_, sparse batch": (lambda _: prune([X.to_sparse()]), "cannot be run on a batch"),
    "prune_, meta batch": (lambda _: prune([META]), "cannot be run on a batch"),
    "prune_, unknown input": (lambda _: prune([{"z": X}]), "cannot be run on a batch"),
    "save_sparse, lazy": (lambda f: wirings.save_sparse(nn.LazyLinear(4), f / "a"), "belongs to a lazy module"),
    "wire_, share": (lambda _: wirings.wire_(plain(), density=0.5, share=ARRAY), "share must be a text"),  # type: ignore
    "wire_, script": (
        lambda _: wirings.wire_(torch.jit.script(plain()), density=0.5),
        "cannot change a scripted module",
    ),
    "merge_adapters_": (lambda _: wirings.merge_adapters_(3), "expects a torch.nn.Module, got int"),  # type: ignore
    "finalize_": (lambda _: wirings.finalize_(nn.Linear), "expects a torch.nn.Module, got type"),  # type: ignore
    "unwire_": (lambda _: wirings.unwire_(None), "expects a torch.nn.Module, got NoneType"),  # type: ignore
    "rewind_, model": (lambda _: wirings.rewind_("x", {}), "expects a torch.nn.Module, got str"),  # type: ignore
    "rewind_, state": (lambda _: wirings.rewind_(plain(), None), "expects a state_dict, got None"),  # type: ignore
    "rewind_, names": (lambda _: wirings.rewind_(plain(), {1: X}), "expects a state_dict"),  # type: ignore
    "semi_structured_": (lambda _: wirings.semi_structured_(3, X), "expects a torch.nn.Module, got int"),  # type: ignore
    "snapshot_of": (lambda _: snapshot_of(3), "expects a torch.nn.Module, got int"),  # type: ignore
    "snapshot_of, meta": (lambda _: snapshot_of(plain().to("meta")), r"0\.weight has no values"),
    "snapshot_of, lazy": (lambda _: snapshot_of(nn.LazyLinear(4)), "weight has no values"),
    "HAM, wiring": (lambda _: ham(wiring=True), "expects the handle of a wired model or None, got bool"),
    "HAM, limit": (lambda _: ham(limit=1e308), "limit must be a number from 0 to"),
    "l1_anneal": (lambda _: rules.get("l1_anneal", coefficient=1e308), "coefficient must be a number from 0 to"),
    "engine.compile": (lambda _: engine.compile(plain(), X, engine=ARRAY), "unknown engine"),  # type: ignore
    "hub, results": (lambda f: hub.save_pretrained(plain(), f, results=torch.tensor(0.5)), "results must be"),  # type: ignore
    "hub, best": (lambda f: hub.save_pretrained(plain(), f, best=ARRAY), "best must be true or false"),  # type: ignore
    "hub, card": (lambda f: hub.save_pretrained(plain(), f, card=ARRAY), "card must be true or false"),  # type: ignore
    "open_run, best": (lambda _: open_run("x", best=ARRAY), "best must be true or false"),  # type: ignore
    "beam_search, beams": (lambda _: search(beams=2**63), "beams must be a whole number from 1 to"),
    "beam_search, penalty": (lambda _: search(penalty="x"), "penalty must be a number"),
    "beam_search, source": (lambda _: search(source=X), "expects source tokens, int64"),
    "bleu, no texts": (lambda _: bleu([3], ["a"]), "expected lists of sentences"),  # type: ignore
    "bleu, a text": (lambda _: bleu("ab", "ab"), "expected lists of sentences"),
    "bleu, nothing": (lambda _: bleu([], []), "expected at least one sentence"),
    "generate, length": (lambda _: generate("x", length="3"), "length must be a whole number"),  # type: ignore
    "generate, prompt": (lambda _: generate("x", 3), "prompt must be a text"),  # type: ignore
    "generate, seed": (lambda _: generate("x", seed=2**80), "seed must be a whole number"),
    "text, context": (lambda f: text(f, context=None), "context must be an integer of at least 1, got None"),
    "text, batch": (lambda f: text(f, batch=None), "batch must be an integer of at least 1, got None"),
    "text, zero": (lambda f: text(f, batch=0), "batch must be an integer of at least 1, got 0"),
    "text, workers": (lambda f: text(f, workers="x"), "workers must be an integer of at least 0"),
    "text, seed": (lambda f: text(f, seed=ARRAY), "seed must be an integer of at least 0"),
    "text, long epochs": (lambda f: text(f, epoch_steps=10**9), "an epoch of 1000000000 steps .* is too long"),
    "text, large batches": (lambda f: text(f, batch=10**9), "is too long"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_one_error_class_at_once(name: str, tmp_path: Path) -> None:
    call, message = CASES[name]
    begun = time.monotonic()
    with pytest.raises(WiringError, match=message):
        call(tmp_path)
    assert time.monotonic() - begun < 10


@pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")
def test_generators_of_tokens() -> None:
    model = models.get("gpt", layers=1, width=16, heads=2, context=8, classes=11)
    generator = engine.compile(model, torch.zeros(1, 8, dtype=torch.int64), engine="sparse", threads=1).generator()
    for options, message in (
        ({"prompt": None}, "expects tokens, integers in a list or a tensor, got None"),
        ({"prompt": META}, "expects tokens, integers in a list or a tensor"),
        ({"generator": 3}, "expects a torch.Generator or None"),
    ):
        with pytest.raises(WiringError, match=message):
            list(generator.generate(**{"prompt": [1], "length": 2, **options}))
    for temperature in (1e-300, 10**30, float("inf")):  # they used to divide by zero, or to overflow
        generator.reset()
        assert len(list(generator.generate([1, 2], 3, temperature=temperature))) == 3


@pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")
def test_tokens_out_of_range_where_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wirings.engine.engine_model.fastest_of", lambda *calls, **_: [2.0] + [1.0] * (len(calls) - 1))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    fast = engine.compile(models.get("gpt", layers=1, width=16, heads=2, context=8, classes=11), tokens)
    assert fast.uses_torch
    assert fast(tokens).shape == (1, 8, 11)
    for token in (11, -1, 2**62):  # PyTorch raises an IndexError
        with pytest.raises(WiringError, match="expects tokens from 0 to 10, got"):
            fast(tokens + token)


def test_a_long_plan_of_acdc_takes_no_time() -> None:
    begun = time.monotonic()
    wirings.wire_(plain(), "acdc", density=0.5).plan(10**12)
    assert time.monotonic() - begun < 5


def test_names_that_no_code_can_have() -> None:
    model = nn.Sequential()
    model.add_module("a\n'\"", nn.Linear(8, 4))
    with pytest.raises(WiringError, match="cannot be traced"):
        wirings.compact(model, X)


def places_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to every value in nested mappings and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inner for place in places_in(one, (*at, key)))]


@pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")
def test_threads_of_numpy_are_written_to_files(tmp_path: Path) -> None:
    fast = engine.compile(plain(), X, engine="sparse", threads=np.int64(2))  # type: ignore[arg-type]
    assert engine.load(fast.save(tmp_path / "a.safetensors")).threads == 2
    wirings.ship(plain(), X, threads=np.int64(2), seconds=0.001, out=tmp_path / "shipped")  # type: ignore[arg-type]


def error_of(call: Callable[[], Any]) -> str | None:
    """The message of the WiringError that a call raises; None if it works."""
    try:
        call()
    except WiringError as error:
        return str(error)
    return None


def test_damaged_descriptions_of_wirings_leave_the_model_unchanged() -> None:
    model = plain()
    wiring = wirings.wire_(model, "rigl", density=0.5)
    description, state, refused = wiring.describe(), model.state_dict(), 0
    for place in places_in(description)[1:]:
        for junk in (None, -1, 10**30, "x", [], {}, [1]):
            damaged, other = copy.deepcopy(description), plain()
            holder, before = damaged, copy.deepcopy(other.state_dict())
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = junk
            said = error_of(lambda other=other, damaged=damaged: wirings.rewire_(other, damaged, state))
            if said is None:
                continue
            refused += 1
            assert len(said) < 1000
            assert other.state_dict().keys() == before.keys(), (place, junk)
            assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items()), (place, junk)
    assert refused > 200
    with pytest.raises(WiringError, match="its description or its state is damaged"):
        wirings.rewire_(plain(), {**description, "part": torch.zeros(3)}, state)
    for odd in ({"allowed": True}, {"allowed": "x"}, {"allowed": torch.zeros(0)}, {"state": {1: 2}}):
        with pytest.raises(WiringError):
            wirings.rewire_(plain(), description, **{"state": state, **odd})


def test_translations_of_an_edited_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translations, "bleu", lambda *_: 12.5)
    result = json.loads(
        next((Path(__file__).parents[1] / "results" / "table1").rglob("seed0.json")).read_text(encoding="utf-8")
    )
    for name in (translations.TRANSLATIONS, translations.REFERENCES):
        (tmp_path / name).write_text("a b\n")
    for settings in ({}, {"data": None}, {"data": {"options": [1]}}, {"data": {"options": {"bleu": False}}}):
        (tmp_path / "result.json").write_text(json.dumps({**result, "settings": settings}))
        assert translations.score_translations(tmp_path).value == 12.5
