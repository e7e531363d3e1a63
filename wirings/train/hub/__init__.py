"""Share trained networks on the Hugging Face Hub, or in a folder: ``pip install "wirings[hub]"``.

    wirings.hub.push_to_hub("runs/table1/static-dnw/seed0", "me/static-dnw")
    model = wirings.hub.from_pretrained("me/static-dnw")

`save_pretrained` writes four files: ``config.json`` (which network of `wirings.models`, and how it is wired),
``model.safetensors`` (its weights, those of a sparse network without the zeros, or a compact model), ``README.md`` (a
model card, made from the run's result) and ``wiring.png`` (a picture of the wiring). None of them holds code, and
loading them executes none.

Folders are written and read without huggingface_hub; only the Hub itself needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from wirings.errors import WiringError
from wirings.train.hub.contents import Results, load_folder, prepare
from wirings.utils.files import check_folder, check_path

__all__ = ["from_pretrained", "push_to_hub", "save_pretrained"]


def save_pretrained(
    model: nn.Module | str | PathLike[str],
    folder: str | PathLike[str],
    *,
    results: Results | Sequence[Results] = (),
    name: str | None = None,
    card: bool = True,
    best: bool = False,
    sparse: bool = True,
) -> Path:
    """Write a trained network to a folder, which `from_pretrained` reads.

    Args:
        model: the folder of a finished run, the name of a trained network that comes with the package, a model that
            `wirings.models.get` built (wired, finalized or dense), or a compact model. A wired model is saved with all
            its edges and with its wiring, so that training can go on.
        folder: where to write; made if it does not exist. Files of the same names are replaced.
        results: what the model card reports: a `Result`, a result's file, the folder of a finished run, or several of
            them, with different seeds, for a mean and a standard deviation. The result of the run in ``model`` is
            always reported. The name of a network that comes with the package, such as ``"table2/dnw"``, is a result,
            too.
        name: the title of the card, and the name to load the model by; by default that of the folder.
        card: whether to write the model card and its picture. Without a result, there can be none.
        best: of a run, save the network of the best epoch instead of the last.
        sparse: whether to store only the real edges of a network that is not wired, such as a finalized one, if that
            saves at least a tenth of the file. `from_pretrained` loads the same network either way; with False,
            programs without this library can read the weights, too.

    Returns:
        The folder.
    """
    check_folder(folder, "save_pretrained()")
    target = Path(folder)
    prepare(model, target.resolve().name if name is None else name, results, card=card, best=best, sparse=sparse).write(
        target
    )
    return target


def push_to_hub(
    model: nn.Module | str | PathLike[str],
    name: str,
    *,
    results: Results | Sequence[Results] = (),
    card: bool = True,
    best: bool = False,
    sparse: bool = True,
    **options: Any,
) -> str:
    """Upload a trained network to the Hugging Face Hub. Log in first: ``hf auth login``.

    Args:
        model: see `save_pretrained`.
        name: the repository, such as ``"me/static-dnw"``. It is made if it does not exist.
        results: see `save_pretrained`.
        card: see `save_pretrained`.
        best: see `save_pretrained`.
        sparse: see `save_pretrained`.
        options: those of ``push_to_hub`` of huggingface_hub's ``ModelHubMixin``, such as ``private``, ``token``,
            ``branch``, ``create_pr`` and ``commit_message``.

    Returns:
        The address of the commit.
    """
    hub = _hub()
    return hub.push(prepare(model, name, results, card=card, best=best, sparse=sparse), name, options)


def from_pretrained(name: str | PathLike[str], **options: Any) -> nn.Module:
    """Load a network that `save_pretrained` or `push_to_hub` wrote. Nothing in its files is executed.

    Args:
        name: a folder, or the name of a repository on the Hub.
        options: for the Hub, those of ``from_pretrained`` of huggingface_hub's ``ModelHubMixin``: ``revision``,
            ``token``, ``cache_dir``, ``force_download`` and ``local_files_only``.

    Returns:
        The model on the CPU, in evaluation mode. One that was wired is wired again, with the same rule, budget and
        step; its handle is ``model.wiring``.
    """
    folder = check_path(name, "a folder, or a name on the Hub,")
    if folder.is_dir():
        if options:
            raise WiringError(f"{', '.join(options)}: options of the Hub, but {name} is a folder. Leave them out.")
        return load_folder(folder)
    if folder.is_file():
        raise WiringError(
            f"{name} is a file, but from_pretrained() expects a folder or a name on the Hub. Read a compact model's "
            "file with wirings.load_compact()."
        )
    return _hub(f"there is no folder {name}, and loading from").pull(str(name), options)


def _hub(what: str = "uploading to") -> Any:
    try:
        from wirings.train.hub import mixin
    except ImportError as error:
        raise WiringError(
            f"{what} the Hugging Face Hub needs the package huggingface_hub: pip install wirings[hub]"
        ) from error
    return mixin
