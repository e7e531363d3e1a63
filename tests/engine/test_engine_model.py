"""Compiled networks: settings, reports, files and errors."""

import copy
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import wirings
from tests.engine.test_kernels import nodes
from wirings import WiringError, engine
from wirings.compaction.operations import Activation, Add, Conv, Embedding, InputRef, TorchOperator
from wirings.compaction.program import Program
from wirings.engine.execution_plan import ExecutionPlan

needs_kernels = pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def program() -> Program:
    return nodes(3, (20, 20), [12, 18, 10], 1, 0.3)


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", engine.ENGINES)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_all_engines_return_the_same(program: Program, way: str, batch: int) -> None:
    images = torch.randn(batch, 3, 20, 20)
    close(engine.compile(program, engine=way, threads=2)(images), program.run(images)[0])


def test_wired_models_are_compacted_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, 2, 1), nn.Flatten(),
        nn.Linear(8 * 25, 4),
    )  # fmt: skip
    wirings.wire_(model, "dnw", density=0.1)
    images = torch.randn(3, 3, 10, 10)
    expected = model.eval()(images).detach()
    close(engine.compile(model, images[:1])(images), expected)
    close(engine.compile(wirings.compact(model, images[:1]))(images), expected)


def test_threads_follow_pytorch(program: Program) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert engine.compile(program, engine="sparse").threads == 1
        assert engine.compile(program, engine="sparse", threads=3).threads == 3
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_report_has_a_line_for_every_step(program: Program) -> None:
    made = engine.compile(program, engine="sparse", threads=1)
    report = made.report
    assert {step.way for step in report.steps if step.kind == "nodes"} == {"sparse"}
    # nonzero edges and nine weights a node, at every pixel
    convs = [o for o in program.operations if isinstance(o, Conv)]
    assert sum(step.mult_adds for step in report.steps if step.kind in ("nodes", "sums")) == sum(
        400 * int(conv.weight.count_nonzero()) for conv in convs
    )
    assert report.seconds > 0
    assert "multiply-adds" in str(report)
    json.dumps(report.as_mapping())


@needs_kernels
def test_engine_setting_applies_to_all_layers(program: Program) -> None:
    for way in ("sparse", "dense"):
        made = engine.compile(program, engine=way, threads=2)
        assert {step.way for step in made.report.steps} - {""} == {way}


@needs_kernels
def test_choices_are_saved(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine.compile(program, threads=2)
    assert made.save(tmp_path / "net.safetensors").exists()
    images = torch.randn(1, 3, 20, 20)

    def never(*_: Any) -> None:
        raise AssertionError("it was measured again")

    monkeypatch.setattr("wirings.engine.engine_model.tune", never)
    again = engine.load(tmp_path / "net.safetensors")
    assert again.choices == made.choices
    assert (again.engine, again.threads) == ("auto", 2)
    close(again(images), program.run(images)[0])
    assert engine.load(tmp_path / "net.safetensors", engine="dense", threads=1).threads == 1
    monkeypatch.setattr("wirings.engine.engine_model.processor", lambda: "another one")
    with pytest.raises(AssertionError, match="measured again"):  # as on another machine
        engine.load(tmp_path / "net.safetensors")


def test_state_dict_raises(program: Program) -> None:
    made = engine.compile(program, engine="torch")
    with pytest.raises(wirings.WiringError, match=r"no state_dict.*save\(\)"):
        nn.Sequential(made, nn.Flatten()).state_dict()
    with pytest.raises(wirings.WiringError, match=r"compile that again"):
        made.load_state_dict({})


@needs_kernels
@pytest.mark.parametrize("choice", [["sparse", 10**6], ["dense", -1], ["sparse", 0], ["neither", 1]])
def test_choices_in_a_file_are_checked(program: Program, choice: list[Any], tmp_path: Path) -> None:
    """With too many strips, the kernels would write outside their memory."""
    made = engine.compile(program, threads=2)
    chosen = made.choices
    chosen["steps"] = [[choice for _ in steps] for steps in chosen["steps"]]
    notes = {**program.notes, "engine": chosen}
    Program(program.inputs, program.operations, program.outputs, notes).save(tmp_path / "net.safetensors")
    again = engine.load(tmp_path / "net.safetensors")
    assert choice not in [c for steps in again.choices["steps"] for c in steps]
    images = torch.randn(3, 3, 20, 20)
    close(again(images), program.run(images)[0])


@pytest.mark.parametrize("steps", [None, 3, [3], [[3]], [["sparse"]], [[["sparse", 1, 2]]], [[["sparse", "1"]]], "no"])
def test_choices_of_another_form_are_rejected(program: Program, steps: Any, tmp_path: Path) -> None:
    notes = {**program.notes, "engine": {"engine": "auto", "threads": 1, "processor": "", "steps": steps}}
    Program(program.inputs, program.operations, program.outputs, notes).save(tmp_path / "net.safetensors")
    with pytest.raises(WiringError, match=r"net.safetensors cannot be read: expected a way and a number of strips"):
        engine.load(tmp_path / "net.safetensors")


@needs_kernels
@pytest.mark.parametrize(("target", "shape"), [("aten::reshape", (1, 48)), ("aten::expand", (1, 3, 4, 4))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_files_that_fail_on_several_images_are_rejected(
    target: str, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    """One image passes, but a compiled network takes any batch size."""
    operations = [
        Conv("a", ("x",), torch.randn(3, 3, 1, 1, dtype=dtype)),
        TorchOperator("b", ("a",), target, (InputRef(0), shape)),
    ]
    Program({"x": (3, 4, 4)}, operations, ("b",)).save(tmp_path / "net.safetensors")
    with pytest.raises(WiringError, match=r"net.safetensors cannot be read: RuntimeError"):
        engine.load(tmp_path / "net.safetensors", threads=2)


@needs_kernels
@pytest.mark.parametrize("error", [WiringError("this is a bug in wirings"), MemoryError("not enough memory")])
def test_errors_of_the_kernels_are_not_blamed_on_the_file(
    program: Program, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.save(tmp_path / "net.safetensors")

    def fails(*_: Any) -> None:
        raise error

    for name in ("choose", "run"):
        with monkeypatch.context() as patch:
            patch.setattr(ExecutionPlan, name, fails)
            with pytest.raises(type(error), match=f"^{error}$"):
                engine.load(tmp_path / "net.safetensors", engine="sparse")
    with monkeypatch.context() as patch:
        patch.setattr("wirings.engine.engine_model.kernels", fails)
        with pytest.raises(type(error), match=f"^{error}$"):
            engine.load(tmp_path / "net.safetensors")


def test_loads_the_file_of_a_compact_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()).eval()
    images = torch.randn(2, 3, 9, 9)
    wirings.compact(model, images).save(tmp_path / "net.safetensors")
    close(engine.load(tmp_path / "net.safetensors", engine="sparse")(images), model(images).detach())


def test_copies_and_pickles(program: Program) -> None:
    images = torch.randn(2, 3, 20, 20)
    made = engine.compile(program, engine="sparse", threads=2)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), engine.compile(made, engine="dense")):
        close(other(images), made(images))


@pytest.mark.parametrize("way", ["auto", "sparse", "dense"])
def test_inputs_that_pytorch_negates_as_it_reads(way: str) -> None:
    model = nn.Linear(4, 2).eval()
    made = engine.compile(model, torch.randn(1, 4), engine=way, threads=2)
    for batch in (1, 5):
        x = torch.randn(batch, 4, dtype=torch.cfloat).conj().imag
        assert x.is_neg()
        close(made(x), model(x.resolve_neg()).detach())
        close(made(x[:1].expand(batch, 4)), model(x[:1].expand(batch, 4)).detach())


class Wrapper(Tensor):
    """A tensor whose numbers are another's, as those of many libraries are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(x.inner if isinstance(x, Wrapper) else x for x in args), **(kwargs or {}))


def without_storage() -> Tensor:
    x = torch.randn(2, 4)
    x.untyped_storage().resize_(0)
    return x


@needs_kernels
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_numbers_of_their_own_are_refused() -> None:
    """The kernels would read from address zero."""
    made = engine.compile(nn.Linear(4, 2).eval(), torch.randn(1, 4), engine="sparse", threads=1)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(2, 4))
    for x in (without_storage(), Wrapper(torch.randn(2, 4)), fake, torch._efficientzerotensor((2, 4))):
        with pytest.raises(WiringError, match=r"tensors that hold their numbers, got .*Pass plain tensors"):
            made(x)
    with pytest.raises(WiringError, match=r"tensors that hold their numbers"):
        torch.vmap(made)(torch.randn(3, 2, 4))
    with pytest.raises(WiringError, match=r"a nested one\. Pad it"):
        made(torch.nested.nested_tensor([torch.randn(4), torch.randn(4)]))


@needs_kernels
def test_operators_without_a_kernel_run_on_pytorch() -> None:
    weight = torch.randn(4, 3, 3, 3)
    operations = [
        Conv("a", ("x",), weight, None, (1, 1), (1, 1)),
        TorchOperator("b", ("a",), "aten::sin", (InputRef(0),)),
        Conv("c", ("b",), torch.randn(2, 4, 1, 1)),
    ]
    mixed = Program({"x": (3, 8, 8)}, operations, ("c", "a"), {"one_output": False})
    made = engine.compile(mixed, engine="sparse", threads=2)
    assert [segment.plan is None for segment in made._segments] == [False, True, False]
    images = torch.randn(5, 3, 8, 8)
    for result, expected in zip(made(images), mixed.run(images), strict=True):
        close(result, expected)
    assert "torch" in {step.way for step in made.report.steps}


def test_integer_inputs_and_a_fixed_batch_size() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(5, 3), nn.Linear(3, 2)

        def forward(self, words: Tensor) -> Tensor:
            return self.layer(self.table(words).mean(1)).relu()

    model, words = Words(), torch.randint(5, (3, 4))
    made = engine.compile(model, words, threads=2)
    close(made(words), model(words).detach())
    assert made.report.seconds > 0
    with pytest.raises(WiringError, match=r"input: a compiled network expects int64 on the CPU, got torch\.float32"):
        made(words.float())
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(0, (2, 1)), nn.Flatten(0, 1), nn.ReLU(), nn.Linear(4, 2))
    made = engine.compile(mixed, torch.randn(2, 4), threads=2)
    assert made.report.steps
    with pytest.raises(WiringError, match="batch size of 2, got a batch of 3"):
        made(torch.randn(3, 4))


def test_tables_of_different_sizes_for_the_same_tokens() -> None:
    tables = [Embedding("long", ("words",), torch.randn(9, 4)), Embedding("short", ("words",), torch.randn(5, 4))]
    for first, second in ((0, 1), (1, 0)):
        operations = [tables[first], tables[second], Add("sum", ("long", "short"))]
        program = Program({"words": (6,)}, operations, ("sum",), {"types": {"words": "torch.int64"}})
        made = engine.compile(program, engine="sparse", threads=1)
        words = torch.randint(5, (2, 6))
        close(made(words), program.run(words)[0])
        if made.compiled:
            with pytest.raises(WiringError, match="expects tokens from 0 to 4, got 5 to 5"):
                made(torch.full((1, 6), 5))


@needs_kernels
@pytest.mark.parametrize("which", ["plan", "apart"])
def test_wrong_outputs_raise(program: Program, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ExecutionPlan.run

    def wrong(self: ExecutionPlan, *args: Any) -> list[Tensor]:
        return [x + 1e-2 * (self.together == (which == "plan")) for x in right(self, *args)]

    monkeypatch.setattr(ExecutionPlan, "run", wrong)
    with pytest.raises(WiringError, match="the outputs of the compiled network differ from the model's"):
        engine.compile(program, engine="sparse", threads=2)


@needs_kernels
def test_calls_from_several_threads(program: Program) -> None:
    made = engine.compile(program, engine="sparse", threads=2)
    images = [torch.randn(1 + i % 3, 3, 20, 20) for i in range(6)]
    expected = [program.run(x)[0] for x in images]
    problems: list[BaseException] = []

    def call(i: int) -> None:
        try:
            for _ in range(20):
                close(made(images[i]), expected[i])
        except BaseException as error:
            problems.append(error)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not problems, problems[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: engine.compile(p, engine="fast"), "unknown engine 'fast'.*auto, dense, sparse, torch"),
        (lambda p: engine.compile(p, threads=0), "must be a positive integer, got 0"),
        (lambda p: engine.compile(p, threads=True), "must be a positive integer, got True"),
        (lambda p: engine.compile(p, threads=2**32 + 1), "at most 1,024, got 4,294,967,297"),
        (lambda p: engine.compile(nn.Linear(2, 2)), "needs example_input for Linear"),
        (lambda p: engine.compile("model"), "got str"),
        (lambda p: engine.compile(p, engine="sparse")(torch.zeros(1, 3, 19, 20)), r"got \(1, 3, 19, 20\). Compile it"),
        (lambda p: engine.compile(p, engine="sparse")(torch.zeros(3, 20, 20)), r"got \(3, 20, 20\)"),
        (lambda p: engine.compile(p, engine="sparse")(torch.zeros(1, 3, 20, 20).double()), "float32 on the CPU"),
        (lambda p: engine.compile(p, engine="sparse")(), r"expected 1 inputs \(x\), got 0"),
        (lambda p: engine.load("nowhere.safetensors"), "nowhere.safetensors does not exist"),
        (lambda p: engine.compile(p, engine="sparse").save("net.onnx"), r"ends in \.safetensors.*compact model"),
        (lambda p: engine.compile(p, engine="sparse").save("nowhere/net.safetensors"), "folder nowhere.*not exist"),
    ],
)
def test_errors(program: Program, make: Any, words: str) -> None:
    with pytest.raises(WiringError, match=words):
        make(program)


def test_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(2, 4, 3, padding=1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.first(x) + self.second(y)

    model, x, y = Two(), torch.randn(5, 3, 6, 6), torch.randn(5, 2, 6, 6)
    made = engine.compile(model, (x[:2], y[:2]), engine="sparse", threads=2)
    close(made(x, y), model(x, y).detach())
    with pytest.raises(WiringError, match="got 5 for input, 4 for input_1"):
        made(x, y[:4])


@needs_kernels
def test_networks_that_are_too_large_run_on_pytorch(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wirings.engine.execution_plan.MAX_FLOATS", 1000)
    made = engine.compile(program, engine="sparse")
    assert [segment.plan for segment in made._segments] == [None]
    images = torch.randn(2, 3, 20, 20)
    close(made(images), program.run(images)[0])


@needs_kernels
@pytest.mark.parametrize(
    ("operation", "native"),
    [
        (Conv("y", ("x",), torch.randn(2, 3, 3, 3), None, (17, 1), (1, 1)), False),
        (Conv("y", ("x",), torch.randn(2, 3, 3, 3), None, (16, 3), (1, 1)), True),
        (Activation("y", ("x",), "softplus", (2.0, 20.0)), False),
        (Activation("y", ("x",), "softplus", (1.0, 20.0)), True),
        (Activation("y", ("x",), "clamp", (-1.0, float("inf"))), True),
    ],
)
def test_operations_without_a_kernel(operation: Any, native: bool) -> None:
    single = Program({"x": (3, 40, 40)}, [operation], ("y",))
    made = engine.compile(single, engine="sparse", threads=2)
    assert [segment.plan is not None for segment in made._segments] == [native]
    images = 3 * torch.randn(2, 3, 40, 40)
    close(made(images), single.run(images)[0])
