"""save_sparse and load_sparse: small files of any model's state."""

import copy
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_options import OPTIONS
from safetensors import safe_open
from torch import Tensor, nn

import wirings
from wirings import WiringError, load_compact, models, rules
from wirings.utils.tensor_files import read_tensors, write_tensors

pytestmark = pytest.mark.filterwarnings("ignore:.*had not removed the others yet")


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.Linear(32, 32),
    )


X = torch.randn(6, 4, 4, 4, generator=torch.Generator().manual_seed(0))


def thinned(model: nn.Module, density: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= torch.rand_like(parameter) < density


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


def header_of(path: Path) -> dict[str, Any]:
    with safe_open(str(path), "pt") as file:
        header = file.metadata()
    return {**header, "state": json.loads(header["state"])}


def wire(model: nn.Module, name: str, **budget: Any) -> wirings.Wiring:
    rule = rules.get(name, **OPTIONS.get(name, {}))
    return wirings.wire_(model, rule, **({} if rule.own_budget else budget or {"density": 0.25}))


def train(model: nn.Module, wiring: wirings.Wiring, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wiring.plan(4)
    for _ in range(steps):
        loss = model(X).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wiring.step(optimizer)


@given(
    st.sampled_from([0.01, 0.1, 0.5, 1.0]), st.sampled_from([None, "float16", "bfloat16", "int8"]), st.integers(0, 9)
)
@settings(max_examples=30, deadline=None)
def test_plain_models_come_back(density: float, dtype: str | None, seed: int) -> None:
    model = network(seed)
    thinned(model, density)
    model(X)  # changes the running statistics
    with tempfile.TemporaryDirectory() as folder:
        path = wirings.save_sparse(model, Path(folder) / "model.safetensors", dtype)
        again = wirings.load_sparse(network(seed + 1), path)
    for (name, x), (other, y) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other
        if dtype is None or x.dim() < 2:
            assert torch.equal(x, y)
        else:
            torch.testing.assert_close(y, x, rtol=0, atol=float(x.abs().max()) / (120 if dtype == "int8" else 250))
            assert torch.equal(x != 0, y != 0)


@pytest.mark.parametrize("rule", rules.names())
def test_a_wired_model_is_saved_as_if_finalized(rule: str, tmp_path: Path) -> None:
    model = network()
    if rule == "keep":
        thinned(model, 0.3)
    wiring = wire(model, rule)
    train(model, wiring)
    before = copied(model)
    path = wirings.save_sparse(model, tmp_path / "model.safetensors")
    assert_same(copied(model), before)  # still wired, with all its edges
    about = header_of(path)["state"]["wiring"]
    for layer, report in zip(wiring.layers, wiring.report(), strict=True):
        if report.edges < layer.weight.numel():
            density = round(report.edges / layer.weight.numel(), 6)
            assert about[report.name] == {"rule": rule, "k": report.edges, "density": density}
    plain = wirings.load_sparse(network(1), path)
    assert_same(copied(plain), copied(wirings.finalize_(copy.deepcopy(model))))


@pytest.mark.parametrize("rule", sorted(set(rules.names()) - {"expander", "dense"}))
def test_a_wired_model_takes_the_edges_of_a_file(rule: str, tmp_path: Path) -> None:
    model = network()
    if rule == "keep":
        thinned(model, 0.3)
    wiring = wire(model, rule)
    train(model, wiring)
    path = wirings.save_sparse(model, tmp_path / "model.safetensors")
    expected = copied(wirings.load_sparse(network(), path))
    other = network(1)
    if rule == "keep":  # the zeros that it keeps are those of the file
        wirings.load_sparse(other, path)
    handle = wire(other, rule)
    assert wirings.load_sparse(other, path) is other
    for name, real in handle.masks().items():
        nonzero = expected[name] != 0
        assert torch.equal(real & nonzero, nonzero)
        assert int(real.sum()) == int(wiring.masks()[name].sum())
    torch.testing.assert_close(other.eval()(X), wirings.load_sparse(network(), path).eval()(X), rtol=0, atol=0)
    train(other.train(), handle)  # the rule goes on
    wirings.finalize_(other)


def test_a_mask_rule_keeps_edges_that_weigh_zero(tmp_path: Path) -> None:
    model = network()
    wiring = wire(model, "set")
    wiring.layers[0].weight.data.zero_()
    path = wirings.save_sparse(model, tmp_path / "model.safetensors", "int8")
    other = network(1)
    handle = wire(other, "set")
    wirings.load_sparse(other, path)
    for name, real in wiring.masks().items():
        assert torch.equal(handle.masks()[name], real)
    assert not other[0].weight.any()


@pytest.mark.parametrize(
    ("rule", "budget", "why"),
    [
        ("rigl", {"density": 0.1}, "0.weight has 144 edges in the file, but rule 'rigl' chooses 57. Wire the model"),
        ("dnw", {"density": 0.5}, "0.weight has 144 edges in the file, but rule 'dnw' chooses 288. Wire the model"),
        ("dense", {}, "but rule 'dense' chooses 576"),
        ("expander", {"density": 0.25}, "but rule 'expander' chooses 144, others than these"),
        ("keep", {}, "rule 'keep' keeps the zeros of 0.weight"),
    ],
)
def test_a_wiring_that_the_rule_cannot_take_is_refused(rule: str, budget: Any, why: str, tmp_path: Path) -> None:
    model = network()
    wire(model, "random")
    path = wirings.save_sparse(model, tmp_path / "model.safetensors")
    other = network(1)
    thinned(other, 0.3)
    handle = wire(other, rule, **budget)
    before, masks = copied(other), handle.masks()
    with pytest.raises(WiringError, match=f"model.safetensors cannot be loaded into this wired Sequential: .*{why}"):
        wirings.load_sparse(other, path)
    assert_same(copied(other), before)
    assert_same(handle.masks(), masks)


@pytest.mark.parametrize("share", ["global", "scaled", "erk"])
def test_budgets_over_all_layers(share: str, tmp_path: Path) -> None:
    model = network()
    wiring = wirings.wire_(model, "dnw", density=0.2, share=share)
    path = wirings.save_sparse(model, tmp_path / "model.safetensors")
    other = network(1)
    handle = wirings.wire_(other, "dnw", density=0.2, share=share)
    wirings.load_sparse(other, path)
    assert [r.edges for r in handle.report()] == [r.edges for r in wiring.report()]


def test_a_model_with_a_wired_part(tmp_path: Path) -> None:
    def larger(seed: int) -> nn.Sequential:
        return nn.Sequential(network(seed), nn.Linear(32, 5))

    model, other = larger(0), larger(1)
    wiring, handle = wirings.wire_(model[0], "rigl", density=0.2), wirings.wire_(other[0], "rigl", density=0.2)
    path = wirings.save_sparse(model, tmp_path / "model.safetensors")
    wirings.load_sparse(other, path)
    assert_same(handle.masks(), wiring.masks())
    assert torch.equal(other.eval()(X), model.eval()(X))
    whole = wirings.wire_(larger(2), "rigl", density=0.2).model
    part = wirings.save_sparse(model[0], tmp_path / "part.safetensors")
    with pytest.raises(WiringError, match=r"1.weight was wired together with its layers. Load the whole model"):
        wirings.load_sparse(whole[0], part)  # type: ignore[index]


def test_graphs_and_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for make, x in (
        (lambda: models.get("digits_static", rule="dnw"), torch.randn(2, 1, 8, 8)),
        (lambda: models.get("gpt", width=32, layers=2, heads=2, rule="dnw", density=0.1), torch.randint(200, (2, 8))),
    ):
        model, other = make(), make()
        path = wirings.save_sparse(model, tmp_path / "model.safetensors")
        assert {one["rule"] for one in header_of(path)["state"]["wiring"].values()} == {"dnw"}
        wirings.load_sparse(other, path)
        assert torch.equal(other.eval()(x), model.eval()(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.ones(60, 60, dtype=torch.bool).tril())
        self.register_buffer("turns", torch.linspace(0, 1, 600).view(20, 30))


@pytest.mark.parametrize("rule", [None, "random"])
def test_tied_weights_are_stored_once(rule: str | None, tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    if rule:
        wirings.wire_(model, rule, density=0.1, include=["head"])
    path = wirings.save_sparse(model, tmp_path / "model.safetensors", "int8")
    assert header_of(path)["state"]["tied"] == {"head.weight": "table.weight"}
    other.steps.zero_()
    wirings.load_sparse(other, path)
    assert other.head.weight is other.table.weight
    assert int(other.steps) == 3
    assert torch.equal(other.mask, model.mask)
    assert torch.equal(other.turns, model.turns)  # buffers are not rounded
    largest = float(model.head.weight.detach().abs().max())
    torch.testing.assert_close(other.head.weight, model.head.weight.detach(), rtol=0, atol=largest / 120)
    if rule:
        assert int(other.head.weight.count_nonzero()) == 200


def test_the_header_says_what_is_in_a_file(tmp_path: Path) -> None:
    model = network()
    wirings.wire_(model, "rigl", density=0.1, include=["0", "4"])
    model[5].weight.data[:, 3:] = 0
    header = header_of(wirings.save_sparse(model, tmp_path / "new folder" / "model.safetensors"))
    assert header["version"] == wirings.__version__
    assert header["state"]["model"] == "Sequential"
    assert header["state"]["wiring"] == {
        "0.weight": {"rule": "rigl", "k": 57, "density": round(57 / 576, 6)},
        "4.weight": {"rule": "rigl", "k": 819, "density": round(819 / 8192, 6)},
        "5.weight": {"rule": None, "k": 96, "density": 0.09375},
    }


def test_other_models_are_told_what_differs(tmp_path: Path) -> None:
    path = wirings.save_sparse(network(), tmp_path / "model.safetensors")
    other = nn.Sequential(*network(1), nn.Linear(3, 3))
    other[4] = nn.Linear(128, 32)
    before = copied(other)
    with pytest.raises(
        WiringError,
        match=r"model.safetensors does not fit this Sequential: 2 tensors are missing in it \(6.bias, 6.weight\); "
        r"4.weight has shape \(32, 128\), but \(32, 256\) in it. Load it into a model of the architecture",
    ):
        wirings.load_sparse(other, path)
    assert_same(copied(other), before)
    with pytest.raises(
        WiringError, match=r"11 tensors are unexpected \(0.bias, 0.weight, 1.bias, 1.num_batches.* more"
    ):
        wirings.load_sparse(nn.Identity(), path)
    changed = network()
    changed[1].num_batches_tracked = torch.tensor(1.0)
    with pytest.raises(WiringError, match=r"1.num_batches_tracked is of type float32, but int64 in it"):
        wirings.load_sparse(changed, path)


def test_other_precisions_are_converted(tmp_path: Path) -> None:
    model = network()
    path = wirings.save_sparse(model, tmp_path / "model.safetensors")
    half = wirings.load_sparse(network(1).half(), path)
    assert_same(copied(half), copied(model.half()))
    path = wirings.save_sparse(half, tmp_path / "half.safetensors")
    assert_same(copied(wirings.load_sparse(network(2), path)), copied(half.float()))


class Extra(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}


def test_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(WiringError, match=r"save_sparse\(\) expects a torch.nn.Module, got dict"):
        wirings.save_sparse({}, path)  # type: ignore[arg-type]
    with pytest.raises(WiringError, match=r"load_sparse\(\) expects a torch.nn.Module, got str"):
        wirings.load_sparse("model", path)  # type: ignore[arg-type]
    with pytest.raises(WiringError, match="unknown dtype 'float64'"):
        wirings.save_sparse(network(), path, torch.float64)
    with pytest.raises(WiringError, match=r"model.safetensors does not exist"):
        wirings.load_sparse(network(), path)
    with pytest.raises(WiringError, match=r"weight is on the meta device, without values"):
        wirings.save_sparse(nn.Linear(2, 2, device="meta"), path)
    with pytest.raises(
        WiringError, match=r"weight cannot be saved: expected a dense tensor of type .* got .*complex64"
    ):
        wirings.save_sparse(nn.Linear(2, 2, dtype=torch.complex64), path)
    with pytest.raises(WiringError, match="_extra_state in the state of this Extra is a dict, no tensor"):
        wirings.save_sparse(Extra(), path)
    model = network()
    wire(model, "dnw")
    model[4].parametrizations.weight.original.data[0, 0] = float("nan")  # type: ignore[index]
    with pytest.raises(WiringError, match=r"4.weight contains 1 NaN"):
        wirings.save_sparse(model, path)
    assert not list(tmp_path.iterdir())
    wirings.save_sparse(network(), path)
    with pytest.raises(WiringError, match=r"inner.safetensors could not be written: .* Free some space, or choose"):
        wirings.save_sparse(network(), path / "inner.safetensors")
    with pytest.raises(WiringError, match=r"does not contain a compact model"):
        load_compact(path)
    small = wirings.compact(nn.Conv2d(1, 1, 1), torch.zeros(1, 1, 4, 4)).save(tmp_path / "compact.safetensors")
    with pytest.raises(
        WiringError, match=r"compact.safetensors is another. Compact models are loaded by wirings.load_c"
    ):
        wirings.load_sparse(network(), small)


def rewritten(path: Path, change: Any) -> None:
    """Change a file's header and tensors, and write it with a valid checksum."""
    tensors, header = read_tensors(path, lambda header: None)
    del header["checksum"]
    state = json.loads(header["state"])
    change(tensors, state, header)
    write_tensors(path, tensors, {**header, "state": json.dumps(state)} if "state" in header else header)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda tensors, state, header: header.update(schema="9"),
            "has schema '9', but this version reads '1'. Upgrade",
        ),
        (lambda tensors, state, header: state.pop("tied"), "cannot be read: expected a state with encoded, model"),
        (lambda tensors, state, header: state.update(tied=[]), "cannot be read: expected mappings"),
        (lambda tensors, state, header: state["tied"].update(a="b"), "cannot be read: expected ties to stored tensors"),
        (lambda tensors, state, header: state["tied"].update(a=[]), "cannot be read: expected ties to stored tensors"),
        (lambda tensors, state, header: state["tied"].update({"0.bias": "4.bias"}), "read: expected every tensor once"),
        (lambda tensors, state, header: tensors.pop("4.weight.values"), "read: expected a tensor 4.weight.values"),
        (lambda tensors, state, header: state["encoded"]["4.weight"].pop("bits"), "tensors are unexpected"),
        (lambda tensors, state, header: state["encoded"]["4.weight"].update(bits=9), "cannot be read: expected places"),
        (
            lambda tensors, state, header: state["encoded"]["4.weight"].update(shape=[2**20, 2**20]),
            r"4.weight has shape \(32, 256\), but \(1048576, 1048576\) in it",
        ),
    ],
)
def test_crafted_files_are_refused(change: Any, why: str, tmp_path: Path) -> None:
    model = network()
    thinned(model, 0.1)
    path = wirings.save_sparse(model, tmp_path / "model.safetensors")
    rewritten(path, lambda tensors, state, header: None)
    wirings.load_sparse(network(1), path)
    rewritten(path, change)
    other = network(1)
    before = copied(other)
    with pytest.raises(WiringError, match=f"model.safetensors .*{why}"):
        wirings.load_sparse(other, path)
    assert_same(copied(other), before)


def documented_sizes() -> dict[str, list[float]]:
    """The rows of the table in the docs, by density."""
    text = (Path(__file__).parents[2] / "docs" / "compact.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \d+% \|", line)]
    return {density: [float(x) for x in numbers] for density, *numbers in rows}


@pytest.mark.parametrize("density", ["50%", "20%", "10%", "5%", "2%", "1%"])
@pytest.mark.parametrize("model", ["resnet18", "gpt"])
def test_sizes(model: str, density: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made, share = models.get(model), float(density[:-1]) / 100
    wiring = wirings.wire_(made, "random", density=share)
    edges = sum(report.edges for report in wiring.report())
    dense = sum(p.numel() for p in made.parameters()) - sum(layer.weight.numel() for layer in wiring.layers)
    place, *documented = documented_sizes()[density]
    documented = documented[:3] if model == "resnet18" else documented[3:]
    for dtype, most, shown in zip((None, "float16", "int8"), (6.5, 4.5, 3.5), documented, strict=True):
        path = wirings.save_sparse(made, tmp_path / "model.safetensors", dtype)
        size = path.stat().st_size
        # The dense embedding of a GPT counts as stored weights: at 2 % it has half as many as there are edges.
        assert size / (edges + dense) == pytest.approx(shown, abs=0.011)
        assert size / (edges + dense) < most - 0.9
        if model == "resnet18" or share > 0.02 or (density == "2%" and dtype is not None):
            assert size / edges < most  # even if everything else in the file is charged to the wired edges
    with safe_open(str(path), "pt") as file:
        places = sum(file.get_tensor(name).numel() for name in file.keys() if name.endswith(".places"))  # noqa: SIM118
    assert places / edges == pytest.approx(place, abs=0.011)


def test_keep_rejects_a_file_with_more_zeros_than_it_keeps(tmp_path: Path) -> None:
    """The model was wired before it was loaded: it would train the zeros of the file."""
    sparse, model = nn.Sequential(nn.Linear(8, 4)), nn.Sequential(nn.Linear(8, 4))
    with torch.no_grad():
        sparse[0].weight[:, ::2] = 0.0
    wirings.save_sparse(sparse, tmp_path / "file.safetensors")
    wiring, before = wirings.wire_(model, "keep"), model[0].weight.detach().clone()
    with pytest.raises(
        WiringError, match=r"zeros of 0.weight, 0 of 32 .* was saved with other zeros, 16\..* wire a plain"
    ):
        wirings.load_sparse(model, tmp_path / "file.safetensors")
    assert wiring.report()[0].edges == 32
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
@pytest.mark.parametrize("rule", ["dnw", "set", "rigl", "soft_threshold", "keep"])
def test_edges_that_weigh_zero_stay_edges_where_all_are_real(rule: str, dtype: str | None, tmp_path: Path) -> None:
    model, again = nn.Sequential(nn.Linear(8, 4)), nn.Sequential(nn.Linear(8, 4))
    wiring, other = (wire(x, rule, density=1.0) for x in (model, again))
    with torch.no_grad():
        model[0].parametrizations.weight.original[1, ::2] = 0
    assert wiring.report()[0].edges == 32
    wirings.save_sparse(model, tmp_path / "file.safetensors", dtype)
    assert header_of(tmp_path / "file.safetensors")["state"]["wiring"]["0.weight"]["k"] == 32
    wirings.load_sparse(again, tmp_path / "file.safetensors")
    assert other.report()[0].edges == 32
    assert other.masks()["0.weight"].all()
    assert torch.equal(again.eval()[0].weight[1, ::2], torch.zeros(4))


def test_compiled_and_parallel_models_are_saved_under_their_own_names(tmp_path: Path) -> None:
    plain, other = nn.Sequential(nn.Linear(8, 4)), nn.Sequential(nn.Linear(8, 4))
    compiled = torch.compile(plain, backend="eager")
    for model in (compiled, nn.DataParallel(plain), nn.DataParallel(compiled)):
        wirings.save_sparse(model, tmp_path / "file.safetensors")
        wirings.load_sparse(other, tmp_path / "file.safetensors")
        assert torch.equal(other[0].weight, plain[0].weight)
        again = torch.compile(nn.Sequential(nn.Linear(8, 4)), backend="eager")
        assert wirings.load_sparse(again, tmp_path / "file.safetensors") is again
        assert torch.equal(again.state_dict()["_orig_mod.0.weight"], plain[0].weight)


@pytest.mark.parametrize("layout", ["sparse_csr", "sparse_coo"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_layouts_are_errors_that_say_what_to_do(layout: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    weight = model[0].weight.detach()
    model[0].weight = nn.Parameter(weight.to_sparse_csr() if layout == "sparse_csr" else weight.to_sparse())
    with pytest.raises(WiringError, match=rf"0\.weight is a tensor of layout {layout}\. Make it dense first"):
        wirings.save_sparse(model, tmp_path / "file.safetensors")
    with pytest.raises(WiringError, match=rf"0\.weight is a tensor of layout {layout}.*to_dense.*skip=\['0.weight'\]"):
        wirings.wire_(model, "keep")
    assert len(wirings.wire_(model, "keep", skip=["0"]).layers) == 1
