"""`wire_(…, structure=…)`: budgets in groups, layers of every kind, mistakes, and all that saves a wiring."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wirings
from wirings import WiringError, models, wire_


def by_hand() -> nn.Linear:
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(
            torch.tensor([[9.0, 0, 1, 1], [0, 0, 1, 1], [3, 3, -2, 2], [3, -3, 2, 2]])
        )  # root mean squares 4.5, 1, 3, 2
    return model


def test_blocks_by_hand() -> None:
    model = by_hand()
    wiring = wire_(model, "dnw", density=0.5, structure="2x2")
    assert model.weight.tolist() == [[9, 0, 0, 0], [0, 0, 0, 0], [3, 3, 0, 0], [3, -3, 0, 0]]
    assert (wiring.look()[0].edges, wiring.look()[0].groups) == (8, 2), "a real edge may weigh zero"
    model.weight.sum().backward()
    assert torch.equal(wiring.layers[0].weight.grad, torch.ones(4, 4)), "all others get a gradient too"


def test_rows_and_columns_by_hand() -> None:
    model = by_hand()
    wire_(model, "dnw", density=0.25, structure="row")
    assert model.weight.any(1).tolist() == [True, False, False, False]
    model = by_hand()  # mean squares of columns: 99 / 4, 18 / 4, and twice 10 / 4, of which the first counts
    real = wire_(model, "dnw", density=0.75, structure="column").masks()["weight"]
    assert (real.all(0).tolist(), real.any(0).tolist()) == ([True, True, True, False],) * 2


def test_nm_by_hand() -> None:
    model = nn.Linear(8, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2, 3, 4, 9, 0, 0, 8], [1, 1, -1, 1, 0, 0, 0, 0]]))
    plain = copy.deepcopy(model)
    wiring = wire_(model, "dnw", structure="2:4")
    assert model.weight.tolist() == [[0, 0, 3, 4, 9, 0, 0, 8], [1, 1, 0, 0, 0, 0, 0, 0]]
    assert wiring.look()[0].edges == 8, "exactly half, even with ties and zeros"
    model.weight.sum().backward()
    assert wiring.layers[0].weight.grad.tolist() == torch.ones(2, 8).tolist()
    assert wire_(plain, "dnw", structure="1:8").masks()["weight"].nonzero().tolist() == [[0, 4], [1, 0]]


def test_free_is_the_default_and_changes_nothing() -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    other = copy.deepcopy(one)
    first, second = wire_(one, density=0.3), wire_(other, density=0.3, structure="free")
    assert type(first.layers[0].edges.selection) is type(second.layers[0].edges.selection)
    assert second.structure is None
    assert "structure" not in str(second)
    assert second.describe() == first.describe()
    assert all(torch.equal(a, b) for a, b in zip(first.masks().values(), second.masks().values(), strict=True))


def test_convolutions_have_blocks_of_channels_with_whole_kernels() -> None:
    model = nn.Conv2d(8, 4, 3).to(memory_format=torch.channels_last)
    mask = wire_(model, structure="2x4", density=0.5).masks()["weight"]
    assert mask.is_contiguous(memory_format=torch.channels_last)
    blocks = mask.view(2, 2, 2, 4, 3, 3).permute(0, 2, 1, 3, 4, 5).reshape(4, -1)
    assert (blocks.all(1) | ~blocks.any(1)).all()
    assert int(blocks.all(1).sum()) == 2


def test_convolutions_have_nm_groups_along_channels() -> None:
    model = nn.Conv2d(8, 4, 3, groups=2).to(memory_format=torch.channels_last)
    mask = wire_(model, structure="1:4").masks()["weight"]
    assert (mask.sum(1) == 1).all(), "one of four channels at every place of the kernel"
    assert mask.is_contiguous(memory_format=torch.channels_last)
    both = wire_(nn.Conv2d(8, 8, 3, groups=2), structure="1:4, transposable").masks()["weight"]
    assert (both.sum(1) == 1).all()
    assert (both.view(2, 4, 4, 3, 3).sum(1) == 1).all(), "and one of four outputs"
    other = wire_(nn.ConvTranspose2d(8, 6, 3), structure="2:4").masks()["weight"]
    assert (other.view(2, 4, 6, 3, 3).sum(1) == 2).all(), "inputs are dimension 0"


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.LSTM(8, 4), torch.randn(3, 2, 8)),
        (nn.MultiheadAttention(8, 2), None),
        (nn.ConvTranspose1d(8, 8, 3, groups=2), torch.randn(2, 8, 5)),
        (nn.Bilinear(4, 4, 8), None),
        (nn.Conv3d(4, 8, 2), torch.randn(1, 4, 3, 3, 3)),
    ],
    ids=["lstm", "attention", "transposed", "bilinear", "conv3d"],
)
@pytest.mark.parametrize("structure", ["2:4", "2:4, transposable", "4x2", "row", "column"])
def test_other_layers(model: nn.Module, x: Tensor | None, structure: str) -> None:
    model = copy.deepcopy(model)
    budget = {} if ":" in structure else {"density": 0.5}
    wiring = wire_(model, structure=structure, **budget)
    for layer, mask in zip(wiring.layers, wiring.masks().values(), strict=True):
        assert layer.edges.groups is not None
        assert layer.edges.groups.whole(mask, None)
        assert mask.sum() * 2 == mask.numel()
    if x is not None:
        model(x)
    wirings.finalize_(model)


def test_experts_have_groups_in_each_matrix() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(3, 4, 8))

    mask = wire_(Experts(), structure="row", density=0.5, include=["matrix"]).masks()["matrix"]
    assert (mask.all(2) | ~mask.any(2)).all()
    mask = wire_(Experts(), structure="row", density=0.5, include=["matrix"], axes={"matrix": "experts in out"}).masks()
    assert (mask["matrix"].all(1) | ~mask["matrix"].any(1)).all()
    mask = wire_(Experts(), structure="1:4", include=["matrix"], axes={"matrix": "experts in out"}).masks()["matrix"]
    assert (mask.sum(1) == 1).all()
    mask = wire_(Experts(), structure="1:4, transposable", include=["matrix"]).masks()["matrix"]
    assert (mask.sum(1) == 1).all()
    assert (mask.unflatten(2, (2, 4)).sum(3) == 1).all()


# ---- budgets --------------------------------------------------------------------------------------------------------


def two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))


def edges(**given: Any) -> list[int]:
    return [report.edges for report in wire_(two(), **given).look()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"structure": "2x2", "density": 0.3}, [16, 8]),  # 4.8 of 16 and 2.4 of 8 blocks
        ({"structure": "2x2", "k": 48}, [32, 16]),
        ({"structure": "2x2", "k": 51}, [32, 16]),  # rounded down to 12 blocks
        ({"structure": "2x2", "budget": {"0": 0.5, "2": 9}}, [32, 8]),
        ({"structure": "row", "density": 0.25}, [16, 8]),
        ({"structure": "column", "density": 0.25}, [16, 8]),
        ({"structure": "column", "k": 50}, [32, 16]),  # 0.52 of 8 columns of 8 and of 4 edges
        ({"structure": "2x2", "params": 48}, [32, 16]),
        ({"structure": "2x2", "mult_adds": 0.5, "example_input": (8,)}, [32, 16]),
        ({"structure": "column", "mult_adds": 48, "example_input": (8,)}, [32, 16]),
        ({"structure": "2:4"}, [32, 16]),
        ({"structure": "2:4, transposable"}, [32, 16]),
        ({"structure": "2:4", "density": 0.5}, [32, 16]),
        ({"structure": "2:4", "k": 48}, [32, 16]),
    ],
)
def test_budgets_are_met_in_whole_groups(given: dict[str, Any], expected: list[int]) -> None:
    assert edges(**given) == expected


def test_erk_and_global_budgets_count_groups() -> None:
    assert sum(edges(structure="2x2", density=0.5, share="erk")) == 48
    assert sum(edges(structure="2x2", k=48, share="global")) == 48
    assert sum(edges(structure="2x2", density=0.5, share="scaled")) == 48
    wiring = wire_(two(), structure="column", density=0.5, share="global")
    assert sum(report.groups or 0 for report in wiring.look()) == 8


@pytest.mark.filterwarnings("ignore:share=.global. leaves no edges")
def test_a_global_ranking_compares_root_mean_squares() -> None:
    model = two()
    with torch.no_grad():
        model[0].weight.fill_(1.0)  # columns of 8 edges with a norm of 2.8
        model[2].weight.fill_(1.1)  # columns of 4 edges with a norm of 2.2
    assert [r.groups for r in wire_(model, structure="column", density=0.5, share="global").look()] == [0, 8]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"structure": "2:4", "density": 0.25}, "fixes the number of edges: 2 of every 4, a density of 0.5. Drop dens"),
        ({"structure": "2:4", "k": 47}, "fixes the number of edges of these layers at 48. Drop k=47"),
        ({"structure": "2:4", "share": "erk"}, "2 of every 4. Drop share='erk'"),
        ({"structure": "2:4", "params": 48}, "Drop params="),
        ({"structure": "2:4", "budget": {"0": 0.5}}, "Drop budget="),
        ({"structure": "2x2", "k": 7}, "k = 7 edges are fewer than 2 whole groups of 4; .* nearest .* is 8"),
        ({"structure": "column", "k": 11}, "fewer than one whole group in each layer.*nearest.* is 12"),
        ({"structure": "column", "k": 48, "share": "global"}, "over groups of different sizes. Give density="),
        ({"structure": "2x2", "k": 1000}, "allow only 96"),
        ({"structure": "2x2", "budget": {"0": 3}}, "3 edges in 0.weight are fewer than one whole group of 4"),
        ({"structure": "2x2"}, "a budget is exactly one of"),
        ({"structure": "2x2", "density": 0.5, "mult_adds": 40}, "mult_adds= bounds a number of single edges"),
        ({"structure": "2x2", "mult_adds": 40, "share": "global"}, "ranks single edges"),
        ({"structure": "2x2", "mult_adds": 6, "example_input": (8,)}, "one group of edges in each .* costs 8"),
        ({"structure": "3x2", "density": 0.5}, r"0.weight of shape \(8, 8\) has 8 outputs and 8 inputs. The nearest "
         r'block that divides it is "2x2". "3x2, padded" makes .* skip=\[\'0.weight\'\]'),
        ({"structure": "2:5"}, "keeps 2 of every 5 inputs of a node, but 0.weight .* has 8 inputs, which is not"),
        ({"structure": "32*32", "density": 0.5}, 'structure= expects "free", an N:M such as'),
        ({"structure": None, "density": 0.5}, "structure= expects .* got None"),
    ],
)  # fmt: skip
def test_mistakes(given: dict[str, Any], says: str) -> None:
    model = two()
    keys = list(model.state_dict())
    with pytest.raises(WiringError, match=says):
        wire_(model, **given)
    assert list(model.state_dict()) == keys
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("model", "given", "says"),
    [
        (nn.Conv2d(3, 8, 3), {"structure": "2:4"}, r"weight of shape \(8, 3, 3, 3\) has 3 inputs.*skip=\['weight'\]"),
        (nn.Conv2d(8, 8, 3, groups=8), {"structure": "2:4"}, "each of the 8 groups of weight .* has 1 inputs"),
        (
            nn.Conv2d(8, 8, 3, groups=4),
            {"structure": "4x2", "density": 0.5},
            'each of the 4 groups .* has 2 outputs and 2 inputs.*"2x2"',
        ),
        (wirings.StaticGraph([4, 8, 4]), {"structure": "2:8"}, "8 does not divide the sending nodes of the tiles"),
        (wirings.StaticGraph([4, 8, 4]), {"structure": "3x4", "density": 0.5}, 'nearest block that does is "2x4"'),
        (
            nn.Linear(8, 4),
            {"structure": "2:4", "allowed": {"weight": torch.rand(4, 8) < 0.9}},
            "allowed= excludes edges of weight",
        ),
    ],
)
def test_rejects_weights_that_do_not_fit(model: nn.Module, given: dict[str, Any], says: str) -> None:
    keys, kind = list(model.state_dict()), type(model)
    with pytest.raises(WiringError, match=says):
        wire_(model, **given)
    assert (list(model.state_dict()), type(model)) == (keys, kind), "the model is unchanged"


def test_padded_blocks_are_smaller_at_the_borders() -> None:
    model = nn.Linear(5, 3, bias=False)
    wiring = wire_(model, structure="2x2, padded", density=1.0)
    assert wiring.look()[0].groups == 6
    assert wiring.look()[0].edges == 15
    assert wire_(nn.Linear(5, 3), structure="32x32, padded", density=0.5).look()[0].edges == 15, "one block at least"


# ---- allowed edges, starts, reports, files --------------------------------------------------------------------------


def test_allowed_edges_of_groups() -> None:
    allowed = torch.ones(4, 4, dtype=torch.bool)
    allowed[:2, :2] = False
    allowed[3, 3] = False
    model = by_hand()
    wiring = wire_(model, structure="2x2", density=0.67, allowed={"weight": allowed})
    assert wiring.layers[0].edges.possible == 3, "blocks without an allowed edge do not exist"
    mask = wiring.masks()["weight"]
    assert torch.equal(mask, allowed & torch.tensor([[False], [False], [True], [True]]))
    assert (wiring.look()[0].edges, wiring.look()[0].possible) == (7, 11)
    model.weight.sum().backward()
    assert torch.equal(wiring.layers[0].weight.grad != 0, allowed)
    wirings.finalize_(model)


@pytest.mark.parametrize("rule", ["dnw", "gmp", "set", "rigl", "random"])
@pytest.mark.parametrize("structure", ["2x2", "2:4", "2:4, transposable", "3x3, padded"])
def test_starts_from_a_sparse_network(rule: str, structure: str) -> None:
    model = two()
    wirings.finalize_(
        wire_(model, "random", structure=structure, **({} if ":" in structure else {"density": 0.4})).model
    )
    real = [weight != 0 for weight in model.parameters()]
    with torch.no_grad():
        model[0].weight[real[0].nonzero()[0][0], real[0].nonzero()[0][1]] = 0.0  # its group is real all the same
    wiring = wire_(model, rule, structure=structure, start="weights")
    for mask, before in zip(wiring.masks().values(), real, strict=True):
        if ":" in structure:
            assert int(mask.sum()) == int(before.sum())
            assert int((before & ~mask).sum()) <= 1
        else:
            assert torch.equal(mask, before)


def test_the_table_shows_the_structure() -> None:
    wiring = wire_(two(), structure="2x2", density=0.5)
    assert "structure: 2x2, 12 of 24 groups" in str(wiring)
    assert repr(wiring) == "<Wiring of Sequential: DNW(decay=0.0) in 2x2, 2 layers, step 0>"
    assert "k=8 groups of edges" in repr(wiring.layers[0].edges)
    assert str(wire_(two(), structure="2:4")).endswith("structure: 2:4")
    assert str(wire_(two(), structure="2:4, transposable")).endswith("structure: 2:4, transposable")


@pytest.mark.parametrize("rule", ["dnw", "rigl", "gmp", "soft_threshold"])
@pytest.mark.parametrize(
    "given",
    [
        {"structure": "2x2", "density": 0.5},
        {"structure": "2x2", "k": 48, "share": "global"},
        {"structure": "column", "k": 50},
        {"structure": "3x3, padded", "density": 0.5},
        {"structure": "2x2", "mult_adds": 48, "example_input": (8,)},
        {"structure": "2:4"},
        {"structure": "2:4, transposable"},
    ],
    ids=str,
)
def test_is_described_and_restored(rule: str, given: dict[str, Any]) -> None:
    model = two()
    wiring = wire_(model, rule, **given)
    wiring.plan(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    wiring.step(optimizer)
    other = wirings.unwire_(wire_(two(), density=0.5).model)
    again = wirings.rewire_(other, wiring.describe(), model.state_dict())
    assert again.structure == wiring.structure
    assert again.describe() == wiring.describe()
    for name, mask in wiring.masks().items():
        assert torch.equal(again.masks()[name], mask)
    assert wiring.describe()["format"] == 2, "earlier versions would take it for a free wiring"


@pytest.mark.parametrize("structure", ["2x2", "2:4", "2:4, transposable", "3x3, padded"])
def test_sparse_files(structure: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model, x = two(), torch.randn(3, 8)
    budget = {} if ":" in structure else {"density": 0.4}
    wire_(model, "dnw", structure=structure, **budget)
    wirings.save_sparse(model, tmp_path / "model.safetensors")
    other = two()
    with torch.no_grad():
        for weight in other.parameters():
            weight.normal_()
    wire_(other, "set", structure=structure, **budget)
    wirings.load_sparse(other, tmp_path / "model.safetensors")
    assert torch.equal(other(x), model(x))


def test_scaled_starting_weights() -> None:
    model = two()
    before = model[0].weight.detach().clone()
    wiring = wire_(model, structure="2x2", density=0.25, scale_weights=True)
    torch.testing.assert_close(wiring.layers[0].weight.detach(), before * 2)


def test_a_deep_copy_ranks_its_own_weights_together() -> None:
    model = two()
    wire_(model, structure="2x2", density=0.5, share="global")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].parametrizations.weight.original.mul_(100)
    x = torch.randn(2, 8)
    model(x), copied(x)
    assert copied[0].weight.count_nonzero() > model[0].weight.count_nonzero()


def test_transforms() -> None:
    model, x = two(), torch.randn(5, 8)
    wire_(model, structure="2x2", density=0.5)
    params = dict(model.named_parameters())

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).square().mean()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    assert all(grad.shape[0] == 5 for grad in grads.values())


def test_a_state_belongs_to_its_structure() -> None:
    row, column, free = (wire_(two(), structure=s, density=0.5) for s in ("row", "column", "free"))
    with pytest.raises(WiringError, match="saved with structure='row', but the model is wired with 'column'"):
        column.load_state_dict(row.state_dict())
    with pytest.raises(WiringError, match="saved with structure='free', but the model is wired with 'row'"):
        row.load_state_dict(free.state_dict())
    row.load_state_dict(row.state_dict())


@pytest.mark.parametrize("budget", [{"k": 13}, {"params": 13}, {"budget": {"*": 13}}])
@pytest.mark.parametrize("limited", [False, True])
def test_numbers_of_edges_need_groups_of_one_size(budget: dict[str, Any], limited: bool) -> None:
    """The strongest groups may be the largest, so that an average size would exceed the budget."""
    layer = nn.Linear(5, 5, bias=False)
    options: dict[str, Any] = {"structure": "4x4, padded"}
    if limited:
        options = {"structure": "row", "allowed": {"*": torch.tril(torch.ones(5, 5)).bool()}}
    with pytest.raises(WiringError, match=r"whole groups of one size: those of weight of shape .* differ"):
        wirings.wire_(layer, "dnw", **budget, **options)
    wirings.wire_(layer, "dnw", density=0.5, **options)


def test_more_edges_than_a_layer_has() -> None:
    with pytest.raises(WiringError, match=r"10,000 edges were requested in 0.weight, which allows only 512"):
        wirings.wire_(nn.Sequential(nn.Linear(64, 8)), "dnw", budget={"0": 10000}, structure="row")


@pytest.mark.parametrize("size", [1e-24, 3e25])
def test_blocks_of_extreme_weights_are_ranked(size: float) -> None:
    layer = nn.Linear(8, 4, bias=False)
    with torch.no_grad():
        layer.weight.fill_(size / 1e5)
        layer.weight[:, 4:] = size
    handle = wirings.wire_(layer, "dnw", density=0.5, structure="4x4")
    assert handle.masks()["weight"][:, 4:].all()


@pytest.mark.parametrize("text", ["4 x 4", "4X4", "4×4", " 4x4 "])
def test_spellings_of_blocks(text: str) -> None:
    handle = wirings.wire_(nn.Linear(8, 4), "dnw", density=0.5, structure=text)
    assert int(handle.masks()["weight"].sum()) == 16


def test_a_structure_without_a_rule_is_refused() -> None:
    for options in ({"structure": "2:4"}, {"structure": "2:4", "rule": "dense"}, {"structure": "bogus"}):
        with pytest.raises(WiringError, match="structure"):
            models.get("gpt", layers=1, heads=2, width=8, context=4, classes=5, **options)


def test_states_of_the_former_rule_nm_are_refused() -> None:
    handle = wirings.wire_(nn.Linear(8, 4), "dnw", structure="2:4")
    with pytest.raises(WiringError, match="former rule 'nm'"):
        handle.load_state_dict({**handle.state_dict(), "rule": "nm"})


def test_warns_if_one_group_in_every_layer_is_far_above_the_density() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    text = r"structure='32x32' leaves 25 % of the edges instead of 1 %: .* 2 of 2 layers \(0.weight, 1.weight\) have "
    with pytest.warns(UserWarning, match=text + "fewer than 100. Use smaller groups"):
        wiring = wirings.wire_(model(), "dnw", density=0.01, structure="32x32")
    assert sum(report.edges for report in wiring.report()) == 2 * 32 * 32
    wirings.wire_(model(), "dnw", density=0.01, structure="4x4")  # 2 of 256 blocks
    wirings.wire_(model(), "dnw", density=0.2, structure="32x32")  # one of four is near enough
