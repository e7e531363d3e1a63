"""Histories: records match the wiring, damaged files are detected, and recording has no side effects."""

import copy
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import without_waiting
from torch import nn

import wirings
from wirings import WiringError
from wirings.draw.html import page
from wirings.graph import Complete, ConvNode, Dag
from wirings.history import History, Recorder, WiringState, file_format, snapshot_of
from wirings.history.from_model import WiredWeight, structure_of
from wirings.history.quantize import decode, encode
from wirings.utils.layers import node_matrix

# ---- records -----------------------------------------------------------------------------------------------


def two_by_two() -> tuple[nn.Linear, Recorder]:
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -0.5], [0.25, 0.1]]))
    return layer, Recorder(wirings.wire_(layer, "dnw", k=2), every=1)


def test_records_of_a_two_by_two_matrix() -> None:
    layer, recorder = two_by_two()
    original = layer.parametrizations.weight.original
    with torch.no_grad():
        original[1, 0] = -2.0  # replaces -0.5
    recorder.step(loss=torch.tensor(0.5), accuracy=10)
    with torch.no_grad():
        original[1, 0] = -1.5
    recorder.step()
    history = recorder.history()
    first, second, third = history.states()
    assert history.steps == [0, 1, 2]
    assert [state.indices.tolist() for state in (first, second, third)] == [[0, 1], [0, 2], [0, 2]]
    assert (second.targets.tolist(), second.sources.tolist()) == ([2, 3], [0, 0])  # nodes 0 and 1 send, 2 and 3 receive
    assert (first.born.tolist(), third.born.tolist()) == ([0, 0], [0, 1])
    assert first.weights == pytest.approx([1.0, -0.5])
    assert third.weights == pytest.approx([1.0, -1.5], rel=0.06)
    assert (history.births.tolist(), history.deaths.tolist()) == ([2, 1, 0], [0, 1, 0])
    assert history.notes == [(1, {"loss": 0.5, "accuracy": 10.0})]
    assert history.series("accuracy")[1].tolist() == [10.0]
    assert third.counts().tolist() == [2]
    assert [side.tolist() for side in third.degrees()] == [[0, 0, 1, 1], [2, 0, 0, 0]]
    assert history.state(1).indices.tolist() == [0, 2]
    assert third.alive.tolist() == [True, False, True, True]  # node 1 has no outgoing edge


@given(st.lists(st.lists(st.integers(-127, 127), min_size=6, max_size=6), min_size=1, max_size=6))
def test_any_sequence_of_codes_survives_a_round_trip(codes: list[list[int]]) -> None:
    structure = structure_of([WiredWeight("weight", nn.Linear(3, 2), "weight", torch.empty(2, 3))])
    before, chunks = np.zeros(6, np.int8), []
    for i, row in enumerate(codes):
        after = np.array(row, np.int8)
        chunks.append(file_format.pack_record(i, before, after))
        before = after
    states = list(History(structure, {}, chunks).states())
    for state, row in zip(states, codes, strict=True):
        full = np.zeros(6, int)
        full[state.indices] = state.codes
        assert full.tolist() == row


def test_quantized_weights_are_within_six_percent() -> None:
    weight = torch.cat([torch.logspace(-4.7, 1.5, 500), -torch.logspace(-4.7, 1.5, 500)])
    values = decode(encode(weight, None).numpy())
    assert np.abs(values / weight.numpy() - 1).max() < 0.0595
    odd = torch.tensor([0.0, 1e-20, 1e9, float("inf"), float("nan"), -1e-20])
    assert encode(odd, None).tolist() == [1, 1, 127, 127, 127, -1]  # a real edge never gets code 0
    assert encode(odd, torch.zeros(6, dtype=torch.bool)).tolist() == [0] * 6
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert encode(torch.tensor([-1.0, 0.5], dtype=dtype), None).tolist() == [-97, 91]


LAYERS = {
    "linear": (nn.Linear(3, 4), "weight"),
    "convolution": (nn.Conv2d(4, 6, 3), "weight"),
    "grouped": (nn.Conv2d(4, 6, (1, 2), groups=2), "weight"),
    "transposed": (nn.ConvTranspose2d(4, 6, 2), "weight"),
    "transposed, grouped": (nn.ConvTranspose1d(4, 6, 3, groups=2), "weight"),
    "recurrent": (nn.LSTM(3, 4), "weight_ih_l0"),
    "bilinear": (nn.Bilinear(2, 3, 4), "weight"),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_endpoints_agree_with_node_matrix(kind: str) -> None:
    module, attribute = LAYERS[kind]
    weight = getattr(module, attribute)
    structure = structure_of([WiredWeight("x", module, attribute, weight)])
    for index in range(weight.numel()):
        real = torch.zeros(weight.numel(), dtype=torch.bool)
        real[index] = True
        pair = node_matrix(module, attribute, real.view(weight.shape)).nonzero()[0].tolist()
        targets, sources = structure.endpoints(np.array([index]))
        assert [targets[0] - structure.groups[1].start, sources[0]] == pair


def test_consecutive_layers_share_nodes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(6 * 4, 5))
    weights = [WiredWeight(str(i), model[i], "weight", model[i].weight) for i in (0, 2, 4)]
    structure = structure_of(weights)
    assert [group[1:] for group in structure.groups] == [(0, 3), (3, 11), (11, 17), (17, 22)]
    assert not structure.paths_known
    index = structure.layers[2].start + 1 * 24 + 4 * 4 + 3  # output 1, pixel 3 of channel 4
    assert [side.tolist() for side in structure.endpoints(np.array([index]))] == [[18], [15]]
    assert structure.inputs.tolist() == [0, 1, 2]
    assert structure.outputs.tolist() == [17, 18, 19, 20, 21]
    weights[1] = WiredWeight(
        "2", nn.Conv2d(7, 6, 3), "weight", torch.empty(6, 7, 3, 3)
    )  # takes more inputs than the first layer gives
    assert [group.name for group in structure_of(weights).groups] == ["0 in", "0", "2 in", "2", "4"]


def test_recurrent_units_are_joined_to_each_other() -> None:
    lstm = nn.LSTM(3, 4)
    weights = [WiredWeight(name, lstm, name, getattr(lstm, name)) for name in ("weight_ih_l0", "weight_hh_l0")]
    structure = structure_of(weights)
    assert structure.nodes == 7
    last = structure.layers[1]
    targets, sources = structure.endpoints(np.array([last.start + 1, last.stop - 1]))
    assert (targets.tolist(), sources.tolist()) == ([3, 6], [4, 6])


GRAPHS: dict[str, Any] = {
    "blocks": lambda: wirings.StaticGraph([2, 5, 4, 3], edges=25, node=ConvNode()),
    "dag": lambda: wirings.StaticGraph(topology=Dag(40, inputs=3), outputs=4, edges=200),
    "matrix": lambda: wirings.StaticGraph(
        topology=torch.ones(12, 12).tril(-2).bool() & (torch.rand(12, 12) < 0.8), inputs=[0], outputs=2, edges=10
    ),
    "complete": lambda: wirings.DiscreteGraph(30, inputs=4, outputs=[7, 2], steps=3, edges=80, node=ConvNode()),
    "sequence": lambda: wirings.DiscreteGraph(
        20, inputs=3, outputs=3, steps=4, edges=40, inflow="every", reads="every"
    ),
    "sequence of any length": lambda: wirings.DiscreteGraph(20, inputs=3, outputs=3, edges=25, inflow="every"),
    "topology": lambda: wirings.ContinuousGraph(topology=Complete(9), inputs=2, outputs=2, edges=12),
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_snapshot_of_a_graph_matches_the_graph(kind: str) -> None:
    graph = GRAPHS[kind]()
    state = snapshot_of(graph).state()
    matrix = graph.matrix().numpy()
    assert state.structure.paths_known
    assert len(state) == int(graph.real().sum())
    assert state.weights == pytest.approx(matrix[state.targets, state.sources], rel=0.0595)
    assert np.flatnonzero(~state.alive).tolist() == graph.dead_nodes()
    kernels = {"blocks": lambda v: graph.functions[1].kernel[v - 2], "complete": lambda v: graph.function.kernel[v]}
    node = 4
    if kind in kernels:
        wanted = kernels[kind](node)[0].detach().numpy()
        assert state.kernel(node) == pytest.approx(wanted, rel=0.0595)
    else:
        assert state.kernel(node) is None


def test_consecutive_graphs_share_nodes() -> None:
    from wirings import models

    model = models.get("mobilenetv1_dnw", rule="dnw", width=0.1)
    state = snapshot_of(model).state()
    blocks = [graph.nodes for graph in model.stages]
    assert state.structure.nodes == sum(blocks) - (64 + 128 + 256 + 512)
    assert len(state) == sum(report.edges for report in model.wiring.look())
    assert state.structure.groups[0].name == "stages.0 block 0"


def test_tied_weights_and_a_global_budget() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4))
    model[1].weight = model[0].weight
    recorder = Recorder(wirings.wire_(model, "dnw", k=20, share="global"), every=1)
    state = recorder.history().state()
    assert len(state.structure.layers) == 2
    assert len(state) == 20
    assert len(snapshot_of(model).state()) == 20


def test_finalizing_does_not_change_the_snapshot() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    wirings.wire_(model, "dnw", density=0.3)
    before = snapshot_of(model).state()
    after = snapshot_of(wirings.finalize_(model)).state()
    assert np.array_equal(before.indices, after.indices)
    assert np.array_equal(before.codes, after.codes)
    with pytest.raises(WiringError, match="Linear has no wiring: none of its layers is wired"):
        snapshot_of(nn.Linear(2, 2))


@pytest.mark.parametrize("rule", wirings.rules.names())
def test_every_rule_can_be_recorded(rule: str) -> None:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2, padding=1)]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 12), nn.Tanh(), nn.Linear(12, 4))
    wiring = wirings.wire_(model, rule, **({} if wirings.rules.get(rule).own_budget else {"density": 0.3}))
    wiring.plan(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorder, masks = Recorder(wiring, every=1), [flat_masks(wiring)]
    for _ in range(6):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 4, 4, 4)), torch.randint(4, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wiring.step(optimizer)
        recorder.step()
        masks.append(flat_masks(wiring))
    for state, mask in zip(recorder.history().states(), masks, strict=True):
        assert np.array_equal(state.indices, np.flatnonzero(mask))


def flat_masks(wiring: Any) -> np.ndarray:
    return np.concatenate([mask.reshape(-1).numpy() for mask in wiring.masks().values()])


def test_recording_does_not_change_training() -> None:
    models = [nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))]
    models.append(copy.deepcopy(models[0]))
    x = torch.randn(5, 6)
    for model, records in zip(models, (False, True), strict=True):
        wiring = wirings.wire_(model, "dnw", density=0.3)
        recorder = Recorder(wiring, every=1) if records else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            wiring.step()
            if recorder is not None:
                recorder.step(loss=loss)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "often"])
def test_rejects_invalid_intervals(every: Any) -> None:
    with pytest.raises(WiringError, match="every must be a number of steps, at least 1, got"):
        Recorder(wirings.wire_(nn.Linear(2, 2), k=2), every=every)


def test_rejects_a_model_instead_of_its_handle() -> None:
    with pytest.raises(WiringError, match=r"expects the handle returned by wirings\.wire_\(model, …\), got Linear"):
        Recorder(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_drops_values_that_are_not_finite() -> None:
    _, recorder = two_by_two()
    recorder.step(loss=float("nan"), accuracy=torch.tensor(50.0))
    assert recorder.history().notes == [(1, {"accuracy": 50.0})]


# ---- files ----------------------------------------------------------------------------------------------------------


def recorded(steps: int, path: Path | None = None, resume: History | None = None, start: int = 0) -> Recorder:
    """Record a graph whose weights are a function of the step."""
    graph = wirings.StaticGraph([3, 6, 5, 2], edges=20, node=ConvNode())
    assert graph.wiring is not None

    def at(step: int) -> None:
        torch.manual_seed(step)
        with torch.no_grad():
            graph.all_weights().copy_(torch.randn(graph.allowed))
            for function in graph.functions[:3]:
                function.kernel.copy_(torch.randn(function.kernel.shape))

    at(start)
    recorder = Recorder(graph.wiring, 2, path=path, resume=resume, step=start, about={"recipe": "none"})
    for step in range(start + 1, steps + 1):
        at(step)
        recorder.step(step, loss=1 / step)
        if step % 3 == 0:
            recorder.note(accuracy=step)
            recorder.flush()
    return recorder


def test_appended_and_saved_files_are_identical(tmp_path: Path) -> None:
    recorder = recorded(9, tmp_path / "history.wirings")
    recorder.close()
    appended = History.load(tmp_path / "history.wirings")
    saved = History.load(recorder.save(tmp_path / "other.wirings"))
    assert (tmp_path / "history.wirings").read_bytes() == (tmp_path / "other.wirings").read_bytes()
    for history in (appended, saved):
        assert history.steps == [0, 2, 4, 6, 8]
        assert history.about == {"rule": "dnw", "recipe": "none"}
        assert history.notes == recorder.history().notes
        assert history.series("accuracy")[0].tolist() == [3, 6, 9]
        assert same(history.state(), recorder.history().state())
        assert repr(history) == "<History: 5 records to step 8, 16 nodes, 91 possible edges>"


def same(a: WiringState, b: WiringState) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a._all, b._all, strict=True))


@pytest.mark.parametrize("stopped", [3, 6, 7])
def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(stopped: int, tmp_path: Path) -> None:
    recorded(12, tmp_path / "whole").close()
    recorded(9, tmp_path / "part").close()  # its records after the checkpoint must be dropped
    recorded(12, tmp_path / "part", History.load(tmp_path / "part"), start=stopped).close()
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "part").read_bytes()


def test_resuming_with_another_model_begins_a_new_history(tmp_path: Path) -> None:
    _, other = two_by_two()
    assert len(recorded(2, resume=other.history()).history()) == 2


def test_detects_any_damage(tmp_path: Path) -> None:
    path = recorded(4).save(tmp_path / "good.wirings")
    good, bad = path.read_bytes(), tmp_path / "bad.wirings"
    ends = [0]
    for at in range(0, len(good), 7):
        bad.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
        with pytest.raises(WiringError, match=r"damaged|not a history|version"):
            History.load(bad)
    whole = History.load(path)
    for chunk in (whole.head(), *whole.chunks):
        ends.append(ends[-1] + len(chunk.framed()))
    ends = [end + len(file_format.MAGIC) for end in ends]
    for at in range(len(good)):
        bad.write_bytes(good[:at])
        if at in ends[1:]:  # the end of a chunk: a valid, shorter history
            assert len(History.load(bad)) <= 3
        else:
            with pytest.raises(WiringError):
                History.load(bad)
        if at > ends[1]:
            part = History.load(bad, whole=False)
            assert part.steps == whole.steps[: len(part)]
            assert (part.damage is None) == (at in ends)
    bad.write_bytes(good[: ends[3] + 20])
    with pytest.raises(
        WiringError, match=r"it ends inside chunk 4\. It is intact up to step 2\. .* --resume repairs the file"
    ):
        History.load(bad)


def test_rejects_other_files(tmp_path: Path) -> None:
    with pytest.raises(WiringError, match=r"cannot read the history .*none\.wirings: No such file"):
        History.load(tmp_path / "none.wirings")
    (tmp_path / "x").write_text("step,loss\n")
    with pytest.raises(WiringError, match="is not a history of a wiring"):
        History.load(tmp_path / "x")
    (tmp_path / "y").write_bytes(b"WIRINGS\x07")
    with pytest.raises(WiringError, match="has format version 7, but this release of wirings reads version 1"):
        History.load(tmp_path / "y")
    (tmp_path / "z").write_bytes(
        file_format.MAGIC + file_format.pack_json(file_format.HEAD, {"structure": {}}).framed()
    )
    with pytest.raises(WiringError, match="is damaged and cannot be read: 'nodes'"):
        History.load(tmp_path / "z")
    with pytest.raises(WiringError, match="cannot write the history to"):
        recorded(1).save(tmp_path / "x" / "history.wirings")
    with pytest.raises(WiringError, match="record 9 is out of range: this history has 2 records"):
        recorded(2).history().state(9)


def crafted(path: Path, change: Callable[[Any], object], *more: file_format.Chunk) -> Path:
    """A file with valid checksums whose structure was changed."""
    history = recorded(4).history()
    head = {"structure": history.structure.to_json(), "about": {}}
    change(head["structure"])
    chunks = [file_format.pack_json(file_format.HEAD, head), *history.chunks, *more]
    path.write_bytes(file_format.MAGIC + b"".join(chunk.framed() for chunk in chunks))
    return path


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s.update(nodes=10**9), "expected at most 16,777,216 nodes"),
        (lambda s: s.update(nodes=-1), "nodes"),
        (lambda s: s["groups"].pop(), "the groups do not contain all nodes"),
        (lambda s: s["groups"][0].__setitem__(2, 10**12), "do not follow one another"),
        (lambda s: s["layers"].clear(), "the layers have no edges"),
        (lambda s: s["layers"][0].__setitem__(3, [10**6, 10**6]), "a layer has another size"),
        (lambda s: s["layers"][0].__setitem__(1, 3), "the layers do not follow one another"),
        (lambda s: s["tiles"].clear(), "the first edges are in no tile"),
        (lambda s: s["tiles"][0].update(targets=10**6), "a tile"),
        (lambda s: s["tiles"][0].update(cols=0), "the tiles of edges do not follow one another"),
        (lambda s: s["tiles"][0].update(inner=0), "a tile has an invalid size"),
        (lambda s: s.update(inputs=[10**6]), "a node does not exist"),
        (lambda s: s.update(outputs=[-1]), "a node does not exist"),
        (lambda s: s.update(outputs=[[0]]), "expected a list of nodes"),
        (lambda s: s.update(kernels=[[[0], 0, [3, 3]]]), "the kernels do not follow the edges"),
        (lambda s: s.update(layout="spiral"), "unknown layout"),
        (lambda s: s.update(walk=[10**9, True, True]), "too many time steps"),
        (lambda s: s.update(walk=["5", True, True]), "too many time steps"),
        (lambda s: s.update(heads={"0.weight": 0}), "a layer has no heads"),
    ],
)
def test_rejects_inconsistent_structures(change: Callable[[Any], object], why: str, tmp_path: Path) -> None:
    with pytest.raises(WiringError, match=f"crafted.wirings is damaged and cannot be read: .*{why}.* Restore it"):
        History.load(crafted(tmp_path / "crafted.wirings", change))


def test_small_files_do_not_fill_the_memory(tmp_path: Path) -> None:
    """A record of 1 MB can unpack to 1 GB, which stood for 4 GB of edges."""
    size = 2**33

    def enlarge(structure: Any) -> None:
        structure.update(nodes=4, groups=[["a", 0, 4]], layers=[["a", 0, size, [size]]])
        structure.update(inputs=[], outputs=[], kernels=[])
        structure["tiles"] = [
            {"start": 0, "targets": 0, "rows": 1, "sources": 0, "cols": 1, "inner": size, "flip": False}
        ]

    new = 2 * 10**8
    record = zlib.compressobj(1)
    content = record.compress(struct.pack("<III", 9, 0, new))
    content += b"".join(record.compress(bytes([1]) * 10**6) for _ in range(5)) + record.flush()
    path = crafted(tmp_path / "crafted.wirings", enlarge)
    history = History.load(path)
    large = History(history.structure, {}, [file_format.Chunk(file_format.STEP, content)])
    with pytest.raises(WiringError, match=r"it has 200,000,000 edges, more than a file of this size"):
        large.state()
    assert large.sound(100)[1] is not None
    text = file_format.pack(file_format.NOTE, b"[9, {" + b" " * 2**24 + b"}]")
    with pytest.raises(WiringError, match="the content is truncated or too long"):
        History.load(crafted(tmp_path / "crafted.wirings", lambda s: None, text))


def test_detects_records_that_do_not_follow_each_other() -> None:
    history = recorded(4).history()
    other = History(history.structure, {}, [history.chunks[0], history._records[2]])
    with pytest.raises(WiringError, match="record 2 of this history is damaged"):
        list(other.states())


def test_errors_name_the_file_of_a_history(tmp_path: Path) -> None:
    history = recorded(4).history()
    path = History(history.structure, {}, [history.chunks[0], history._records[2]]).save(tmp_path / "odd.wirings")
    for damaged in (History.load(path), History.load(path).until(10**6)):
        with pytest.raises(WiringError, match=f"record 2 of {re.escape(str(path))} is damaged"):
            list(damaged.states())
    empty = History.load(History(history.structure, {}).save(path))
    with pytest.raises(WiringError, match=f"{re.escape(str(path))} has no records yet"):
        page(empty, "title")


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_recording_on_a_gpu_does_not_synchronize() -> None:
    graph = wirings.StaticGraph([8, 32, 32, 10], edges=300, node=ConvNode(), rule="dnw").cuda()
    assert graph.wiring is not None
    recorder = Recorder(graph.wiring, every=1)
    recorder.history()
    with without_waiting():
        recorder.step(loss=torch.ones((), device="cuda"))
    state, alone = recorder.history().state(), snapshot_of(graph).state()
    assert np.array_equal(state.indices, alone.indices)
    assert np.array_equal(state.codes, alone.codes)
    assert recorder.history().notes == [(1, {"loss": 1.0})]


def test_thinned_histories_keep_states_and_notes() -> None:
    model = nn.Linear(6, 4)
    wiring = wirings.wire_(model, k=5)
    recorder = Recorder(wiring, 1)
    for _ in range(5):
        with torch.no_grad():
            model.parametrizations.weight.original.normal_()  # type: ignore[union-attr, operator]
        recorder.step(loss=1.0)
    history = recorder.history()
    thin = history.thinned(3)
    assert history.steps == [0, 1, 2, 3, 4, 5]
    assert thin.steps == [0, 2, 5]
    assert thin.notes == history.notes
    by_step = {state.step: state for state in history.states()}
    for state in thin.states():
        assert np.array_equal(state.all_codes(), by_step[state.step].all_codes())
    assert history.thinned(1).steps == [history.steps[-1]]
    assert history.thinned(100) is history
    with pytest.raises(WiringError, match="records must be an integer of at least 1, got 0"):
        history.thinned(0)
