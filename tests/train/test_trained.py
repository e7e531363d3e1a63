"""Trained networks that come with the package, and how runs become such networks."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from commands import call
from soak import SOAK

import wirings
from wirings import WiringError
from wirings.train import bundled, results
from wirings.train import saved_runs as runs
from wirings.train.bundle_run import bundle_run, update_scores
from wirings.train.bundled.card import read_card, write_card
from wirings.train.ship_run import measure_on_test_set
from wirings.utils.cache import cache_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    call("train", "digits/static-dnw", "--set", "epochs=2", "--out", str(folder), "--device", "cpu")
    return folder


@pytest.fixture(scope="module")
def entry(run: Path) -> Path:
    """The folder of its network."""
    return bundle_run(run, run.parent / "zoo", name="digits/short", device="cpu")


# ---- networks of the package -----------------------------------------------------------------------------------------


def test_all_networks_fit_into_the_package() -> None:
    sizes = [sum(path.stat().st_size for path in bundled.folder_of(name).iterdir()) for name in bundled.names()]
    assert max(sizes) <= 3_500_000
    assert sum(sizes) <= 12_000_000


@pytest.mark.parametrize("name", bundled.names())
def test_every_network_opens_and_agrees_with_its_card(name: str) -> None:
    card, model = bundled.card_of(name), wirings.load(name)
    assert not model.training
    assert card.result.recipe == name
    assert card.result.settings["data"]["directory"] is None
    if card.result.mult_adds is not None:
        assert card.mult_adds == card.result.mult_adds
    found = results.find(ROOT / "results", name)
    own = {str(card.result.seed): card.result.score}  # which may be a later training of that seed than in the table
    if found:  # `python -m tools.bundle --update` renews the scores
        assert card.scores == {str(one.seed): one.score for one in found} | own
    assert card.scores.items() >= own.items()


@pytest.mark.parametrize("name", bundled.names())
def test_every_network_reaches_what_its_card_says(name: str) -> None:
    card = bundled.card_of(name)
    if card.result.settings["data"]["name"] != "cifar10" or not (cache_folder() / "cifar10.npy").exists():
        pytest.skip("its data is not in the cache; `wirings data cifar10` puts CIFAR-10 there")
    opened, about = runs.open_with_header(name, False, "cpu")
    examples = 10_000 if SOAK else 400
    found = measure_on_test_set(opened.model, runs.run_data(name, opened, about), opened, examples).value
    # Half precision differs; and 400 images differ from all by 2 points at one standard error.
    assert found == pytest.approx(card.measured, abs=0.3 if SOAK else 8.0)


def test_opens_by_name() -> None:
    model, settings, name, _ = runs.open_run("table1/static-dnw", device="cpu")
    assert (name, settings.model.name, settings.rule.name) == ("table1/static-dnw", "tiny_static", "dnw")
    assert isinstance(model.graph.weight, torch.nn.Parameter)  # finalized
    assert int(model.graph.weight.count_nonzero()) == 32_000
    assert model.graph.longest_path() == 5
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_lists_networks() -> None:
    said = call("models")
    assert "table1/static-dnw" in said
    assert '"table1/static-dnw"' in call("models", "table1/*", "--json")
    described = json.loads(call("models", "table1/static-dnw", "--json"))["table1/static-dnw"]
    assert described["edges"] == 32_000
    assert described["scores"]["0"] == 80.49
    assert described["mult_adds"] == 2_607_050


def test_rejects_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(WiringError, match=r"Did you mean 'table1/static-dnw'\? `wirings models` lists them"):
        runs.open_run("table1/static-dnv")
    with pytest.raises(WiringError, match=r"unknown trained network .*Did you mean 'table1/static-dnw'"):
        wirings.load("table1/static_dnw")
    with pytest.raises(WiringError, match="unknown trained network 'tble'"):
        call("models", "tble")
    with pytest.raises(WiringError, match=r"it is one trained network. Leave out --best"):
        call("eval", "table1/static-dnw", "--best")
    with pytest.raises(WiringError, match="expected a name or a folder as a str"):
        wirings.load(3)  # type: ignore[arg-type]


# ---- networks of runs ------------------------------------------------------------------------------------------------


def test_a_run_becomes_a_network(run: Path, entry: Path) -> None:
    assert sorted(path.name for path in entry.iterdir()) == ["card.json", "history.wirings", "model.safetensors"]
    before, after = wirings.load(run), wirings.load(entry)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(after(x), before(x))
    assert int(after.graph.weight.count_nonzero()) == 200  # type: ignore[union-attr]
    card, result = read_card(entry), results.read(run / "result.json")
    assert card.measured == pytest.approx(result.accuracy)
    assert (card.dtype, card.scores, card.mult_adds) == (None, {"0": result.accuracy}, result.mult_adds)


def test_commands_take_its_folder(entry: Path, tmp_path: Path) -> None:
    assert f"{read_card(entry).measured:.2f} %" in call("eval", str(entry), "--device", "cpu")
    assert "digits/static-dnw, seed 0" in call("show", str(entry))
    assert "MB" in call("show", str(entry), "--html", "-o", str(tmp_path / "page.html"))
    assert "multiply-adds" in call(
        "ship", str(entry), "--examples", "20", "--quick", "--out", str(tmp_path / "shipped")
    )
    assert "trained (digits/static-dnw)" in call("profile", str(entry))


def test_trains_on_with_the_same_zeros(entry: Path) -> None:
    model = wirings.load(entry)
    zeros = model.graph.weight == 0  # type: ignore[union-attr]
    wiring = wirings.wire_(model, "keep")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(torch.randn(4, 1, 8, 8)).square().sum().backward()
        optimizer.step()
        wiring.step(optimizer)
    assert torch.equal(wirings.finalize_(model).graph.weight == 0, zeros)  # type: ignore[union-attr]


def test_rounds_weights_that_do_not_fit(run: Path, tmp_path: Path) -> None:
    sizes = {}
    for limit in (20_000, 6_500, 5_800):
        folder = bundle_run(run, tmp_path, name="digits/small", limit=limit, history_limit=0, device="cpu")
        card = read_card(folder)
        sizes[card.dtype] = (folder / bundled.MODEL).stat().st_size
        assert sizes[card.dtype] <= limit
        assert card.history_sha256 is None
        assert wirings.load(folder)(torch.randn(2, 1, 8, 8)).shape == (2, 10)
        assert card.stored_result.score == card.measured
    assert list(sizes) == [None, "float16", "int8"]
    with pytest.raises(WiringError, match="even in 8 bits, but 100 are left"):
        bundle_run(run, tmp_path / "other", name="digits/small", limit=100, history_limit=0, device="cpu")
    assert not any((tmp_path / "other" / "digits").iterdir())


def test_scores_of_other_seeds(run: Path, entry: Path, tmp_path: Path) -> None:
    mapping = json.loads((run / "result.json").read_text())
    own = mapping["accuracy"]
    for seed, accuracy in ((0, own), (1, own + 2.0)):
        path = tmp_path / "results" / "digits" / "static-dnw" / f"seed{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        settings = {**mapping["settings"], "seed": seed}
        path.write_text(json.dumps({**mapping, "seed": seed, "accuracy": accuracy, "settings": settings}))
    others = results.find(tmp_path / "results", "digits/static-dnw")
    folder = bundle_run(run, tmp_path / "zoo", name="digits/short", others=others[1:], device="cpu")
    assert read_card(folder).scores == {"0": own, "1": own + 2.0}
    assert read_card(folder).over_seeds == f"{own + 1:.2f} ± 1.41 % (2)"
    assert read_card(entry).over_seeds == ""
    assert not update_scores(folder, tmp_path / "results")
    path.unlink()
    assert update_scores(folder, tmp_path / "results")
    assert read_card(folder).scores == {"0": own}


def test_rejects_runs_that_cannot_be_bundled(run: Path, tmp_path: Path) -> None:
    with pytest.raises(WiringError, match=r"differs from recipe digits/static-dnw \(epochs=2\). Give the network"):
        bundle_run(run, tmp_path)
    with pytest.raises(WiringError, match=r"must be table/row, got '../x'"):
        bundle_run(run, tmp_path, name="../x")
    with pytest.raises(WiringError, match=r"is not a finished run: expected result.json"):
        bundle_run(tmp_path, tmp_path)


# ---- damaged files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(entry: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "copied"
    folder.mkdir()
    for path in entry.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("name", [bundled.MODEL, bundled.HISTORY])
def test_rejects_damaged_files(copied: Path, name: str) -> None:
    path = copied / name
    good = bytearray(path.read_bytes())
    good[len(good) // 2] ^= 1
    path.write_bytes(good)
    command = "eval" if name == bundled.MODEL else "show"
    with pytest.raises(WiringError, match=re.escape(name) + " is damaged: its SHA-256 is"):
        call(command, str(copied))
    path.unlink()
    with pytest.raises(WiringError, match="cannot be read: No such file"):
        call(command, str(copied))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": "10"}, "classes must be an integer"),
        ({"classes": 0}, "classes must be at least 1"),
        ({"model_sha256": "x"}, "model_sha256 must be a SHA-256"),
        ({"result": None}, "result must be a mapping"),
        ({"schema": 2}, "schema must be 1, got 2"),
        ({"class_names": ["a"]}, "class_names must be 10 names, got 1"),
        ({"color": 3}, "unknown field of a card 'color'"),
    ],
)
def test_rejects_damaged_cards(copied: Path, change: dict[str, object], message: str) -> None:
    path = copied / "card.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(WiringError, match=f"card.json is damaged .*{message}"):
        runs.open_run(copied, device="cpu")


def test_does_not_import_what_a_card_names(copied: Path) -> None:
    card = json.loads((copied / "card.json").read_text())
    card["result"]["settings"]["model"]["name"] = "antigravity:open"
    (copied / "card.json").write_text(json.dumps(card))
    with pytest.raises(WiringError, match="needs the function antigravity:open, but trained networks are made of"):
        wirings.load(copied)
    assert "antigravity" not in sys.modules


def test_rejects_cards_of_other_networks(copied: Path) -> None:
    other = read_card(bundled.folder_of("table1/static-dnw"))
    write_card(copied, other)
    with pytest.raises(WiringError, match=r"model.safetensors is damaged: its SHA-256"):
        runs.open_run(copied, device="cpu")
    (copied / "card.json").write_text("{")
    with pytest.raises(WiringError, match=r"card.json is damaged or not the card of a trained network"):
        runs.open_run(copied, device="cpu")
