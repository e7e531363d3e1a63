"""The translations that a run wrote to its folder, and their BLEU."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

from wirings.errors import WiringError
from wirings.train import results
from wirings.train.data.bleu import bleu
from wirings.train.data.metrics import BLEU
from wirings.train.data.multi30k import REFERENCES, TRANSLATIONS
from wirings.train.results import Result
from wirings.train.run.folder import RESULT
from wirings.utils.files import read_regular_text


def score_translations(folder: Path) -> Result:
    """Compute the BLEU of a finished run that was trained without sacrebleu, and write it to its result.

    Args:
        folder: the run's folder.

    Returns:
        The result, now measured by BLEU. It counts for its recipe as if BLEU had been computed by the run.
    """
    found, expected = (_lines(folder / name) for name in (TRANSLATIONS, REFERENCES))
    if not (folder / RESULT).exists():
        raise WiringError(f"{folder} has no {RESULT}: its run is not finished. Continue it with --resume.")
    result, value = results.read(folder / RESULT), bleu(found, expected)
    settings = copy.deepcopy(result.settings)
    data = settings.get("data")
    if isinstance(data, dict) and isinstance(data.get("options"), dict):  # results may be edited by hand
        data["options"].pop("bleu", None)
    overrides = {key: changed for key, changed in result.overrides.items() if key != "data.options.bleu"}
    best = result.best_value if result.metric == BLEU.name else None  # not the best of another metric
    result = replace(
        result,
        metric=BLEU.name,
        higher_is_better=True,
        value=value,
        best_value=best,
        settings=settings,
        overrides=overrides,
    )
    results.write_json(folder / RESULT, result)
    return result


def _lines(path: Path) -> list[str]:
    try:
        return read_regular_text(path).removesuffix("\n").split("\n")
    except FileNotFoundError as error:
        raise WiringError(f"there is no {path}. Give the folder of a run that translates.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise WiringError(f"{path} cannot be read: {error}.") from error
