"""The files of a network on the Hub: what they hold, and how the network is made from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from wirings import models, rules
from wirings.compaction import CompactModel, load_compact
from wirings.errors import WiringError
from wirings.models.registry import built_as, is_bundled
from wirings.train import bundled, files
from wirings.train.hub.card import Card, make_card
from wirings.train.hub.limits import CONFIG_BYTES, BuildLimit, check_sizes
from wirings.train.hub.weights import SavedWeights, smaller_state
from wirings.train.results import Result, read
from wirings.train.run import checkpoint
from wirings.train.run.folder import RESULT, SETTINGS
from wirings.train.run_history import load_run_history
from wirings.train.saved_runs import open_with_header
from wirings.utils.checks import check_bool
from wirings.utils.files import check_folder, check_path, disk_errors, read_regular_text
from wirings.utils.text import brief, printable, shortened
from wirings.version import __version__
from wirings.wire.finalize import finalize_, unwire_
from wirings.wire.handle import Wiring
from wirings.wire.parametrization import wired
from wirings.wire.pretrained import handles_of
from wirings.wire.rewire import rewire_
from wirings.wire.sparse_state import SparseState

FORMAT = 1
"""The format of ``config.json``. A change that earlier versions would misread gets the next number."""
CONFIG, MODEL, CARD, PICTURE = "config.json", "model.safetensors", "README.md", "wiring.png"

Results = Result | str | PathLike[str]
"""A result, its file, the folder of its run, or the name of a trained network that comes with the package."""


@dataclass(frozen=True)
class HubFiles:
    """Everything that a folder will hold, checked before the first file is written."""

    model: nn.Module
    config: dict[str, Any]
    card: Card | None
    edges: SparseState | None
    """The weights by their real edges; None if all weights are written."""

    def write(self, folder: Path) -> None:
        """Write the files to a folder, which is made if it does not exist."""
        check_folder(folder, "save_pretrained()")
        remedy = "Free some space, or give another folder."
        with disk_errors(folder, remedy):
            folder.mkdir(parents=True, exist_ok=True)
        if isinstance(self.model, CompactModel):
            self.model.save(folder / MODEL)
        elif self.edges is not None:
            edges = self.edges
            files.write_file(folder / MODEL, lambda part: edges.write(Path(part)), remedy)
        else:
            checkpoint.save_model(folder / MODEL, self.model, {"wirings": __version__}, remedy)
        files.write_text(folder / CONFIG, json.dumps(self.config, indent=1) + "\n", remedy)
        if self.card is not None:
            if self.card.picture is not None:
                self.card.picture.save(folder / PICTURE)
            files.write_text(folder / CARD, self.card.text, remedy)


def prepare(
    model: nn.Module | str | PathLike[str],
    name: str,
    results: Results | Sequence[Results],
    *,
    card: bool,
    best: bool,
    sparse: bool,
) -> HubFiles:
    """Collect what the files of a network hold; see `wirings.hub.save_pretrained` for the arguments."""
    given = _given_results(results)
    check_bool("hub", "best", best)
    check_bool("hub", "card", card)
    check_bool("hub", "sparse", sparse)
    if not isinstance(name, str) or not name:
        raise WiringError(f"name must be a text that is not empty, got {brief(name)}.")
    if isinstance(model, nn.Module):
        if best:
            raise WiringError("best=True selects a checkpoint of a run, but a model was given. Leave it out.")
        network = model
    else:
        network = _open(check_path(model, "a torch.nn.Module, or the folder of a run,"), best)
        bundle = bundled.find(model)
        if card and bundle is not None:
            known = bundled.read_card(bundle)
            given = [known.stored_result, *given] if given else [*known.results_of_seeds]
        elif card:
            given = [model, *given]
    config = {"library_name": "wirings", "format": FORMAT, "version": __version__, **_describe(network)}
    edges = smaller_state(network) if sparse and config["kind"] == "model" and not _is_wired(config) else None
    if not card:
        return HubFiles(network, config, None, edges)
    found = _distinct([one if isinstance(one, Result) else _result_of(one) for one in given])
    _check_same_network(network, found[0] if found else None)
    history = None
    if isinstance(network, CompactModel):  # which has no wiring to draw, unlike the run that it was made from
        runs = [one for one in given if not isinstance(one, Result) and (Path(one).is_dir() or bundled.find(one))]
        history = load_run_history(str(runs[0])).history if runs else None
    made = make_card(name, network, found, history, PICTURE, best=best, edges=edges)
    return HubFiles(network, config, made, edges)


def _given_results(results: Any) -> list[Results]:
    """The results as a list, without reading them."""
    kinds, given = (Result, str, PathLike), results
    if isinstance(results, kinds):
        given = [results]
    elif isinstance(results, Iterable) and not isinstance(results, Tensor):
        given = list(results)
    if not isinstance(given, list) or not all(isinstance(one, kinds) for one in given):
        raise WiringError(
            f"results must be a Result, the path of one, the folder of a run, or a list of these, got {brief(results)}."
        )
    return given


def _open(run: Path, best: bool) -> nn.Module:
    """The model of a run, whose wiring is at the step at which it was saved."""
    opened, about = open_with_header(run, best, "cpu")
    if (wiring := _own_wiring(opened.model)) is not None and about.get("wiring") is not None:
        wiring.load_state_dict(about["wiring"])
    return opened.model


def _result_of(place: str | PathLike[str]) -> Result:
    path = check_path(place)
    if (bundle := bundled.find(path.as_posix())) is not None:
        return bundled.read_card(bundle).stored_result
    if path.is_dir():
        if not (path / RESULT).exists():
            raise WiringError(
                f"{path} has no {RESULT}, which the model card is made from. Finish the run with `wirings train … "
                "--resume`, or pass card=False."
            )
        path = path / RESULT
    return read(path)


def _distinct(results: list[Result]) -> list[Result]:
    """The results without duplicates, checked to be of one recipe."""
    found: list[Result] = []
    for one in results:
        if one in found:
            continue
        for key in ("recipe", "overrides", "metric"):
            expected, got = (getattr(result, key) for result in ([*found, one][0], one))
            if expected != got:
                raise WiringError(
                    f"the results of one card must have the same {key}, got {printable(shortened(repr(expected), 80))} "
                    f"and {printable(shortened(repr(got), 80))}. Pass those of one recipe."
                )
        if one.seed in [result.seed for result in found]:
            raise WiringError(f"two different results of seed {one.seed} are given for one card. Leave one out.")
        found.append(one)
    return found


def _check_same_network(model: nn.Module, result: Result | None) -> None:
    """Raise if a result is that of another network of `wirings.models`."""
    built, settings = built_as(model), None if result is None else result.settings.get("model")
    name = settings.get("name") if isinstance(settings, dict) else None
    if built is not None and result is not None and isinstance(name, str) and name != built.name:
        raise WiringError(
            f"the result of {printable(shortened(result.recipe, 80))} is that of a {printable(shortened(name, 80))}, "
            f"but this network is a {printable(shortened(built.name, 80))}. Pass the result of its own run."
        )


# ---- describing a network, and making it again -----------------------------------------------------------------------


def _describe(model: nn.Module) -> dict[str, Any]:
    """What ``config.json`` says about a network; with its weights, all that is needed to make it again."""
    if isinstance(model, CompactModel):
        return {"kind": "compact"}
    built = built_as(model)
    if built is None:
        raise WiringError(
            f"{type(model).__name__} is not a network of wirings.models, so that it could not be made again without "
            "its code. Save its compact form, wirings.compact(model, example_input); Hugging Face models have a "
            "push_to_hub() of their own, which saves the wiring, too."
        )
    own = _own_wiring(model)
    handles = [handle for handle in handles_of(model) if handle is not own]
    described: dict[str, Any] = {"kind": "model", "model": {"name": built.name, "options": built.options}}
    if len(handles) + (own is not None) > 1:
        raise WiringError(
            f"this {type(model).__name__} was wired {len(handles) + (own is not None)} times, which cannot be saved. "
            "Wire all its layers at once, or call wirings.finalize_(model) first."
        )
    if own is not None:
        described |= {"rule": own.describe()["rule"], "state": own.state_dict()}
    elif handles:
        described["wiring"] = handles[0].describe_within(model)
    try:
        json.dumps(described, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise WiringError(f"an option of model {built.name!r} cannot be written to a file: {error}.") from error
    return described


def _is_wired(config: dict[str, Any]) -> bool:
    """Whether a description is that of a wired network, which needs all its edges."""
    return "rule" in config or "wiring" in config


def _own_wiring(model: nn.Module) -> Wiring | None:
    """The handle of a model that was wired when it was built, unless it has been finalized."""
    wiring = getattr(model, "wiring", None)
    return wiring if isinstance(wiring, Wiring) and not wiring.ended else None


def load_folder(folder: Path, name: str | None = None) -> nn.Module:
    """Load the network in a folder, which messages call ``name``."""
    shown = printable(name or str(folder))
    config = _read_config(folder, shown)
    try:
        if config["kind"] == "compact":
            return load_compact(folder / MODEL)
        return _build(config, folder / MODEL).eval()
    except MemoryError:
        raise
    except Exception as error:  # values of any type and size in a damaged file may cause any error
        reason = printable(shortened(" ".join(str(error).split()), 300))
        raise WiringError(
            f"{shown} cannot be loaded: its files are damaged, do not fit each other, or need another version of "
            f"wirings ({reason})"
        ) from error


def _read_config(folder: Path, shown: str) -> dict[str, Any]:
    expected = f"expected {CONFIG} and {MODEL}, as wirings.hub.save_pretrained() writes them."
    if (folder / SETTINGS).is_file() and not (folder / CONFIG).is_file():
        raise WiringError(
            f"{shown} is the folder of a run: {expected} Open it with wirings.train.saved_runs.open_run(), or save its "
            "network to another folder with wirings.hub.save_pretrained()."
        )
    try:
        if (folder / CONFIG).stat().st_size > CONFIG_BYTES:
            raise ValueError("too large")
        config = json.loads(read_regular_text(folder / CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise WiringError(f"{shown} does not hold a network of wirings: {expected}") from error
    if not isinstance(config, dict) or config.get("library_name") != "wirings":
        hint = ""
        if isinstance(config, dict) and "architectures" in config:
            hint = " It is a model of transformers: load it with from_pretrained of its class, then wirings.rewire_()."
        raise WiringError(f"{shown} does not hold a network of wirings: {expected}{hint}")
    if config.get("format") != FORMAT or config.get("kind") not in ("model", "compact"):
        raise WiringError(
            f"{shown} was written by wirings {printable(str(config.get('version', '?'))[:20])}, but this is wirings "
            f"{__version__}, which cannot read it. Upgrade wirings."
        )
    return config


def _build(config: dict[str, Any], path: Path) -> nn.Module:
    given = config["model"]
    options = dict(given["options"])
    if "rule" in config:
        rule = config["rule"]
        options["rule"] = rules.get(rule["name"], rule.get("schedule"), **rule.get("settings", {}))
    weights = SavedWeights.read(path)
    if is_bundled(given["name"]):  # options of others may be anything, such as a seed
        check_sizes(given["options"], weights.tensors)
    with BuildLimit(weights.tensors):
        return _build_from(config, options, weights)


def _build_from(config: dict[str, Any], options: dict[str, Any], weights: SavedWeights) -> nn.Module:
    if _is_wired(config):
        weights.check_all_edges()
    model = models.get(config["model"]["name"], **options)
    if "rule" in config:
        checkpoint.load_model(model, weights.tensors, weights.path)
        wiring = _own_wiring(model)
        if wiring is None:
            raise WiringError(f"rule {config['rule']['name']!r} leaves this network dense")
        wiring.load_state_dict(config["state"])
        wiring.look()  # swapped edges are counted from here
        return model
    if "wiring" in config:
        if wired(model):
            unwire_(model)
        wiring = rewire_(model, config["wiring"], checkpoint.model_state(weights.tensors))
        if not isinstance(getattr(type(model), "wiring", None), property):  # that of a graph, which is not wired now
            model.wiring = wiring  # type: ignore[assignment]
        return model
    if wired(model):
        finalize_(model)
    weights.load_into(model)
    return model
