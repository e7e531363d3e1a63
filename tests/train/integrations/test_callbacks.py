"""Callbacks for Lightning and the Hugging Face Trainer: they do everything a custom training loop would do."""

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vision import MISSING as NO_TORCHVISION  # noqa: F401 - the packages imported below may import torchvision

import wirings
from wirings import WiringError
from wirings.train.integrations import common

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings inside these packages are not ours to fix


def need(*packages: str) -> None:
    """Skip a test if a package cannot be imported. Called when the test runs, since importing them takes long."""
    for package in packages:
        try:
            importlib.import_module(package)
        except Exception as error:
            pytest.skip(f"pip install {' '.join(packages)}: {error}")


@pytest.fixture
def _lightning() -> None:
    need("lightning")


@pytest.fixture
def _trainer() -> None:
    need("transformers", "accelerate")


needs_lightning, needs_trainer = pytest.mark.usefixtures("_lightning"), pytest.mark.usefixtures("_trainer")
X = torch.randn(48, 8)
Y = torch.arange(48) % 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def falling_density() -> Any:
    return wirings.LinearSchedule(1.0, 0.25, steps=10)


def check_finalized(model: nn.Sequential, edges: list[int]) -> None:
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert not any(hasattr(module, "parametrizations") for module in model.modules())
    assert [int(model[i].weight.count_nonzero()) for i in (0, 2)] == edges


# ---- Lightning ------------------------------------------------------------------------------------------------


def lightning_module() -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: tuple[Tensor, Tensor], place: int) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


def several(callback: Any) -> list[Any]:
    return callback if isinstance(callback, list) else [callback]


def fit(module: Any, callback: Any, folder: Path, epochs: int, resume: Path | None = None, **more: Any) -> Any:
    import lightning

    trainer = lightning.Trainer(
        max_epochs=epochs, callbacks=several(callback), default_root_dir=folder, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(X, Y)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=resume, weights_only=False)
    return trainer


@needs_lightning
def test_lightning_steps_the_wiring_after_every_optimizer_step(tmp_path: Path) -> None:
    from wirings.train.integrations.lightning import WiringCallback

    module = lightning_module()
    wiring = wirings.wire_(module, density=falling_density())
    trainer = fit(module, WiringCallback(wiring), tmp_path, epochs=4, accumulate_grad_batches=2)
    assert wiring.steps == trainer.global_step == 12
    assert trainer.callback_metrics["wiring/edges"] == 64 + 32
    assert trainer.callback_metrics["wiring/density"] == 0.25
    check_finalized(module.model, [64, 32])


@needs_lightning
def test_lightning_passes_the_training_length_and_the_optimizer_to_the_rule(tmp_path: Path) -> None:
    from wirings.train.integrations.lightning import WiringCallback

    module = lightning_module()
    wiring = wirings.wire_(module.model, "sparse_momentum", density=0.25)  # only a part of the module
    fit(module, WiringCallback(wiring, log=False, finalize=False), tmp_path, epochs=2)
    assert wiring.planned == 12
    assert sum(report.edges for report in wiring.look()) == 96
    wirings.finalize_(module)


@needs_lightning
def test_lightning_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    from wirings.train.integrations.lightning import WiringCallback

    whole, half, rest = lightning_module(), lightning_module(), lightning_module()
    fit(whole, WiringCallback(wirings.wire_(whole, density=falling_density())), tmp_path, epochs=2)
    first = WiringCallback(wirings.wire_(half, density=falling_density()), finalize=False)
    fit(half, first, tmp_path, epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    wiring = wirings.wire_(rest, density=falling_density())
    fit(rest, WiringCallback(wiring), tmp_path, epochs=2, resume=tmp_path / "half.ckpt")
    assert wiring.steps == 12
    for name, value in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[name], value)


@needs_lightning
def test_lightning_rejects_the_handle_of_another_model(tmp_path: Path) -> None:
    from wirings.train.integrations.lightning import WiringCallback

    with pytest.raises(WiringError, match=r"expects the handle returned by wirings\.wire_\(model, …\), got Sequential"):
        WiringCallback(network())  # type: ignore[arg-type]
    other = WiringCallback(wirings.wire_(network(), density=0.5))
    with pytest.raises(WiringError, match="the handle wires a Sequential that is not part of the Module"):
        fit(lightning_module(), other, tmp_path, epochs=1)


@needs_lightning
def test_lightning_rejects_a_wired_checkpoint_in_a_finalized_module(tmp_path: Path) -> None:
    from wirings.train.integrations.lightning import WiringCallback

    def fitted(finalize: bool) -> tuple[Any, Any]:
        module = lightning_module()
        type(module).test_step = lambda self, batch, place: None
        callback = WiringCallback(wirings.wire_(module, density=0.25), finalize=finalize)
        trainer = fit(module, callback, tmp_path, epochs=1)
        return module, trainer

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
    module, trainer = fitted(finalize=False)
    trainer.save_checkpoint(tmp_path / "wired.ckpt")
    trainer.test(module, loader, ckpt_path=tmp_path / "wired.ckpt", weights_only=False, verbose=False)
    check_finalized(wirings.finalize_(module).model, [64, 32])
    module, trainer = fitted(finalize=True)
    trainer.test(module, loader, verbose=False)
    with pytest.raises(WiringError, match=r"finalized with 64 edges but now has 256 nonzero weights.* finalize=False"):
        trainer.test(module, loader, ckpt_path=tmp_path / "wired.ckpt", weights_only=False, verbose=False)
    with pytest.raises(WiringError, match=r"Module is no longer wired: .* Wire it again"):
        fit(module, trainer.callbacks[0], tmp_path, epochs=1)


@needs_lightning
def test_lightning_with_two_handles(tmp_path: Path) -> None:
    from wirings.train.integrations.lightning import WiringCallback

    module = lightning_module()
    first = wirings.wire_(module, density=0.25, include=["model.0"])
    second = wirings.wire_(module, "rigl", density=0.5, include=["model.2"])
    callbacks = [WiringCallback(first), WiringCallback(second)]
    fit(module, callbacks, tmp_path, epochs=2)
    check_finalized(module.model, [64, 64])
    assert [callback.wiring.steps for callback in callbacks] == [12, 12]
    same = [WiringCallback(wirings.wire_(network(), density=0.5), name=name) for name in ("a", "b")]
    assert len({callback.state_key for callback in same}) == 2


@needs_lightning
def test_lightning_example() -> None:
    torch.manual_seed(0)
    accuracy, model = runpy.run_path(str(ROOT / "examples" / "lightning_digits.py"))["main"](epochs=3)
    assert accuracy > 60
    assert [int(m.weight.count_nonzero()) for m in model if isinstance(m, nn.Linear)] == [819, 128]


# ---- the Hugging Face Trainer ---------------------------------------------------------------------------------


class ForTrainer(nn.Module):
    """A module as the Trainer expects it: its outputs include the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.model(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def train(module: nn.Module, callback: Any, folder: Path, steps: int, resume: bool = False, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given: dict[str, Any] = {"per_device_train_batch_size": 8, "logging_steps": 2, "learning_rate": 0.05} | more
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, report_to="none", use_cpu=True, disable_tqdm=True,
        lr_scheduler_type="constant", optim="sgd", optim_args="momentum=0.9", **given,
    )  # fmt: skip
    rows = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    trainer = Trainer(model=module, args=arguments, train_dataset=rows, callbacks=several(callback))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@needs_trainer
def test_trainer_steps_the_wiring_after_every_optimizer_step(tmp_path: Path) -> None:
    from wirings.train.integrations.hugging_face import WiringTrainerCallback

    module = ForTrainer()
    wiring = wirings.wire_(module, density=falling_density())
    trainer = train(module, WiringTrainerCallback(wiring), tmp_path, steps=12, gradient_accumulation_steps=2)
    assert wiring.steps == trainer.state.global_step == 12
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["wiring/edges"] for line in logged] == [325.0, 268.0, 210.0, 153.0, 96.0, 96.0]
    assert all("wiring/swapped" in line for line in logged)
    assert "wiring/edges" not in trainer.state.log_history[-1], "not in the final summary"
    check_finalized(module.model, [64, 32])


@needs_trainer
def test_trainer_passes_the_training_length_and_the_optimizer_to_the_rule(tmp_path: Path) -> None:
    from wirings.train.integrations.hugging_face import WiringTrainerCallback

    module = ForTrainer()
    wiring = wirings.wire_(module.model, "sparse_momentum", density=0.25)
    trainer = train(module, WiringTrainerCallback(wiring, log=False, finalize=False), tmp_path, steps=12)
    assert wiring.planned == 12
    assert sum(report.edges for report in wiring.look()) == 96
    assert not any("wiring/edges" in line for line in trainer.state.log_history)
    wirings.finalize_(module)


@needs_trainer
def test_trainer_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    from wirings.train.integrations.hugging_face import WiringTrainerCallback

    torch.manual_seed(0)
    whole, half, rest = ForTrainer(), ForTrainer(), ForTrainer()
    train(whole, WiringTrainerCallback(wirings.wire_(whole, density=falling_density())), tmp_path / "whole", steps=12)
    saved: dict[str, Any] = {"save_steps": 6}
    train(
        half, WiringTrainerCallback(wirings.wire_(half, density=falling_density())), tmp_path / "half", steps=6, **saved
    )
    wiring = wirings.wire_(rest, density=falling_density())
    train(rest, WiringTrainerCallback(wiring), tmp_path / "half", steps=12, resume=True, **saved)
    assert wiring.steps == 12
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(rest.state_dict()[name], value)
    plain = ForTrainer()
    train(plain, callback_without_wiring(), tmp_path / "plain", steps=6, **saved)
    again = ForTrainer()
    wired = WiringTrainerCallback(wirings.wire_(again, density=falling_density()))
    with pytest.raises(WiringError, match="the checkpoint of step 6 was saved without WiringTrainerCallback"):
        train(again, wired, tmp_path / "plain", steps=12, resume=True, **saved)


@needs_trainer
def test_trainer_with_two_handles(tmp_path: Path) -> None:
    from wirings.train.integrations.hugging_face import WiringTrainerCallback

    def trained(folder: Path, steps: int, resume: bool = False) -> tuple[ForTrainer, list[Any]]:
        module = ForTrainer()
        first = wirings.wire_(module, density=falling_density(), include=["model.0"])
        second = wirings.wire_(module, "dnw", density=0.5, include=["model.2"])
        callbacks = [WiringTrainerCallback(first), WiringTrainerCallback(second)]
        train(module, callbacks, folder, steps, resume, save_steps=6)
        return module, callbacks

    trained(tmp_path, steps=6)
    module, callbacks = trained(tmp_path, steps=12, resume=True)
    assert [callback.wiring.steps for callback in callbacks] == [12, 12]
    check_finalized(module.model, [64, 64])


def callback_without_wiring() -> Any:
    from transformers import TrainerCallback

    return TrainerCallback()


@needs_trainer
def test_trainer_example() -> None:
    accuracy, model = runpy.run_path(str(ROOT / "examples" / "trainer_digits.py"))["main"](epochs=3)
    assert accuracy > 40
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)][:-1]
    assert all(int(w.count_nonzero()) == int(0.1 * w.numel()) for w in linear)


# ---- without the packages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "packages"),
    [("lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"]), ("hugging_face", ["transformers"])],
)
def test_a_missing_package_is_named(name: str, packages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"wirings.train.integrations.{name}", raising=False)
    with pytest.raises(WiringError, match=r"cannot import .* pip install"):
        importlib.import_module(f"wirings.train.integrations.{name}")


def test_helpers_of_all_callbacks() -> None:
    model = network()
    wiring = wirings.wire_(model, density=0.5)
    other = torch.optim.SGD([model[0].bias], 0.1)
    ours = torch.optim.SGD([layer.weight for layer in wiring.layers], 0.1)
    assert common.optimizer_of(wiring, [other, ours]) is ours
    assert common.optimizer_of(wiring, [other]) is None
    common.plan_steps(wiring, float("inf"))
    common.plan_steps(wiring, -1)
    common.plan_steps(wiring, None)
    assert common.metrics(wiring) == {"wiring/swapped": 0.0, "wiring/edges": 192.0, "wiring/density": 0.5}
