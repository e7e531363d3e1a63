"""The Hugging Face Hub, by the mixin of huggingface_hub, whose options are the ones that users of the Hub know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import nn

from wirings.errors import WiringError
from wirings.train.hub.contents import CONFIG, MODEL, HubFiles, load_folder
from wirings.utils.text import printable, shortened


class HubNetwork(ModelHubMixin, library_name="wirings"):
    """A network between this machine and the Hub: files to upload, or a model that was downloaded."""

    # The mixin passes entries of config.json to parameters of the same name, so these have names of their own.
    def __init__(self, own_files: HubFiles | None = None, own_model: nn.Module | None = None) -> None:
        self.files, self.model = own_files, own_model

    def _save_pretrained(self, save_directory: Path) -> None:
        assert self.files is not None
        self.files.write(save_directory)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> HubNetwork:
        folder = snapshot_download(model_id, allow_patterns=[CONFIG, MODEL], **options)
        return cls(own_model=load_folder(Path(folder), model_id))


def push(files: HubFiles, name: str, options: dict[str, Any]) -> str:
    """Upload files to the repository ``name``; returns the address of the commit."""
    try:
        return str(HubNetwork(files).push_to_hub(name, **{"commit_message": "Upload a network of wirings", **options}))
    except Exception as error:
        raise _explained(error, f"{printable(name)} could not be uploaded") from error


def pull(name: str, options: dict[str, Any]) -> nn.Module:
    """Download the network in the repository ``name``."""
    try:
        model = HubNetwork.from_pretrained(name, **options).model
    except Exception as error:
        what = f"there is no folder {printable(name)}, and it could not be loaded from the Hub"
        raise _explained(error, what) from error
    assert model is not None
    return model


def _explained(error: Exception, what: str) -> WiringError:
    """The error for users: what failed, why, and what to do."""
    if isinstance(error, WiringError):
        return error
    reason = printable(shortened(" ".join(str(error).split()), 200)) or type(error).__name__
    if isinstance(error, HFValidationError):
        return WiringError(f"{what}: expected a name such as 'user/network', or an existing folder ({reason})")
    if isinstance(error, GatedRepoError):
        return WiringError(f"{what}: its owner has to grant access. Ask for it on its page, then run `hf auth login`.")
    if isinstance(error, RepositoryNotFoundError):
        return WiringError(f"{what}: it does not exist, or it is private. Fix the name, or run `hf auth login`.")
    if isinstance(error, RevisionNotFoundError):
        return WiringError(f"{what}: it has no such revision ({reason})")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError) or (isinstance(error, HfHubHTTPError) and status in (401, 403)):
        return WiringError(f"{what}: you are not allowed to. Run `hf auth login` with a token that can write.")
    if isinstance(error, HfHubHTTPError):
        return WiringError(f"{what}: the Hub rejected the request ({reason})")
    if isinstance(error, (TypeError, ValueError, AttributeError)):  # an option, or a config.json that is not ours
        return WiringError(f"{what}: an option is unknown, or it is not a network of wirings ({reason})")
    return WiringError(f"{what}. Is there a network connection, and is the Hub reachable? ({reason})")
