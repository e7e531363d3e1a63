"""What NVIDIA's command-line tool says about the GPUs of this machine, without a CUDA context in this process."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from wirings.train.sweep.packing import Memory

SECONDS = 20.0
"""How long ``nvidia-smi`` may take."""
MEMINFO = Path("/proc/meminfo")


def uuids(gpus: Sequence[str]) -> dict[str, str]:
    """The UUIDs of GPUs that are named as in CUDA_VISIBLE_DEVICES; empty if one of them is not known."""
    known: dict[str, str] = {}
    for line in _ask("--query-gpu=index,uuid"):
        index, _, uuid = (part.strip() for part in line.partition(","))
        known |= {index: uuid, uuid: uuid}
    return {gpu: known[gpu] for gpu in gpus} if all(gpu in known for gpu in gpus) else {}


def memory(gpu: str) -> list[Memory]:
    """The memory of a GPU and of the machine in MiB, as far as it is known."""
    found = []
    for line in _ask("--query-gpu=memory.used,memory.total", "-i", gpu):
        used, _, total = line.partition(",")
        if used.strip().isdecimal() and total.strip().isdecimal():
            found.append(Memory("GPU memory", float(used), float(total)))
    return [*found[:1], *_of_machine()]


def _of_machine() -> list[Memory]:
    try:
        lines = MEMINFO.read_text(encoding="utf-8").splitlines()
        kib = {line.partition(":")[0]: float(line.split()[1]) for line in lines if len(line.split()) > 1}
        total, free = kib["MemTotal"] / 1024, kib["MemAvailable"] / 1024
    except (OSError, KeyError, ValueError):
        return []
    return [Memory("main memory", total - free, total)]


def _ask(*words: str) -> list[str]:
    """The lines that ``nvidia-smi`` prints; none if it is missing or fails."""
    command = ["nvidia-smi", *words, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]
