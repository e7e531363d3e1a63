"""The tables of docs/reliability.md, from the records that `tests.fuzz` and `tests.sanitize` write."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.common import RESULTS, record

FILES = {
    "compact": "compact models (`.safetensors`)",
    "int8": "compact models, rounded to int8",
    "bfloat16": "compact models, rounded to bfloat16",
    "operators": "compact models with one operator and random arguments",
    "engine": "compiled networks (`.safetensors`)",
    "sparse": "sparse states of `save_sparse`, rounded to int8",
    "sparse_bfloat16": "sparse states, rounded to bfloat16",
    "hub": "descriptions of shared networks (`config.json`)",
    "hub_structure": "descriptions of shared networks with a structure",
    "hub_weights": "weights of shared networks",
    "hub_sparse": "descriptions of shared networks of which only the edges are stored",
    "hub_sparse_weights": "edges of shared networks",
    "pretrained": "descriptions in Hugging Face folders (`config.json`)",
    "pretrained_index": "indices of Hugging Face folders",
    "pretrained_weights": "weights of Hugging Face folders",
    "pretrained_bin": "weights of Hugging Face folders (`pytorch_model.bin`)",
    "authors": "checkpoints of the paper's authors",
    "checkpoint": "checkpoints of runs",
    "history": "histories (`history.wirings`)",
    "settings": "settings of runs (`settings.yaml`)",
    "recipe": "recipes (YAML)",
    "sweep": "sweeps (YAML)",
    "result": "results (`result.json`)",
    "benchmark": "records of benchmarks (JSON)",
    "images": "folders of images (PNG)",
    "shards": "shards (tar)",
    "sizes": "sizes of shards (`sizes.json`)",
    "text": "text",
    "text.gz": "text, compressed (gzip)",
    "text.xz": "text, compressed (xz)",
    "pairs": "sentences and their translations",
    "cifar": "CIFAR-10 (pickles)",
    "cifar.png": "CIFAR-10 (PNG)",
    "cifar_labels": "labels of CIFAR-10 (JSON)",
    "cifar.tar.gz": "CIFAR-10 (archives)",
    "cifar.npy": "CIFAR-10 (prepared)",
    "cifar100": "CIFAR-100 (pickles)",
    "cifar100.npy": "CIFAR-100 (prepared)",
}
CALLS = {
    "setting_changes": "settings changed at random (`--set`)",
    "command_lines": "random command lines",
    "wire_calls": "random calls of `wire_`",
    "arguments": "odd arguments of functions that prune, wire, save, ship, share and generate",
    "graphs": "random neural graphs",
}
ENGINE = {
    "programs": "random programs, compiled",
    "programs_before": "the same by earlier versions of the code; what was wrong led to fixes",
    "sanitizers": "random programs, under AddressSanitizer and UndefinedBehaviorSanitizer",
    "image_sizes": "random networks on images of 1 to 8,192 pixels a side",
    "image_sizes_before": "the same by an earlier version of the code",
}


def found(names: dict[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """The titles and records of those kinds that have one."""
    folder = RESULTS / "reliability"
    return [
        (title, record(f"reliability/{name}")) for name, title in names.items() if (folder / f"{name}.json").exists()
    ]


def ended(one: dict[str, Any], *words: str) -> int:
    """The number of cases whose outcome has one of these words."""
    return sum(n for outcome, n in one["outcomes"].items() if any(re.search(rf"\b{word}\b", outcome) for word in words))


def files() -> str:
    lines = ["| files | variants | refused | read | crashes, other errors, hangs |", "|---|---:|---:|---:|---:|"]
    for title, one in found(FILES):
        refused = ended(one, "refused")
        read = one["cases"] - refused - one["mistakes"]
        lines.append(f"| {title} | {one['cases']:,} | {refused:,} | {read:,} | {one['mistakes']:,} |")
    return "\n".join(lines)


def calls() -> str:
    lines = ["| | cases | refused with a sentence | worked | anything else |", "|---|---:|---:|---:|---:|"]
    for title, one in found(CALLS):
        refused = ended(one, "refused", "usage")
        worked = one["cases"] - refused - one["mistakes"]
        lines.append(f"| {title} | {one['cases']:,} | {refused:,} | {worked:,} | {one['mistakes']:,} |")
    return "\n".join(lines)


def engine() -> str:
    lines = ["| | cases | as PyTorch | refused | wrong, or crashed |", "|---|---:|---:|---:|---:|"]
    for title, one in found(ENGINE):
        right = ended(one, "right")
        refused = one["cases"] - right - one["mistakes"]
        lines.append(f"| {title} | {one['cases']:,} | {right:,} | {refused:,} | {one['mistakes']:,} |")
    return "\n".join(lines)


def runs() -> str:
    lines = []
    for _, one in found({"interruptions": ""}):
        resumed = [(re.findall(r"\d+", how), n) for how, n in one["outcomes"].items() if how.startswith("resumed")]
        kills, others = (sum(int(numbers[i]) * n for numbers, n in resumed) for i in (0, 1))
        lines.append(
            f"- {one['cases']:,} runs were interrupted up to four times each, by {kills:,} kills with −9 and "
            f"{others:,} other ways. {one['cases'] - one['mistakes']:,} of them ended as they would have "
            "without, bit for bit."
        )
    for _, one in found({"lives": ""}):
        lines.append(
            f"- {one['cases']:,} lives in one process. {one['mistakes']:,} measurements found more memory or threads."
        )
    return "\n".join(lines)


FIGURES = {"files": files, "calls": calls, "engine": engine, "runs": runs}
