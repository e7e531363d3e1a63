"""Processes for tests, forked from one that has imported PyTorch, so they start immediately."""

import multiprocessing as mp
import os
import runpy
import socket
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

METHOD = "forkserver"
CONTEXT = mp.get_context(METHOD)
# Making an optimizer imports torch._dynamo.
IMPORTED = ["pytest", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
IMPORTED += ["wirings.cli.app", "wirings.train.phases"]
CONTEXT.set_forkserver_preload(IMPORTED)


def start(target: Callable[..., object], *args: Any, output: Path, env: Mapping[str, str] | None = None) -> BaseProcess:
    """Start a process in the current folder that calls a function of a module.

    Args:
        target: the function, which the process finds by its name.
        args: its arguments.
        output: the file for what the process prints and its errors.
        env: changes to the environment, which is otherwise that of this process.
    """
    process = CONTEXT.Process(target=_run, args=(str(output), {**os.environ, **(env or {})}, os.getcwd(), target, args))
    process.start()
    return process


def wait(process: BaseProcess, timeout: float = 300) -> int | None:
    """Wait until a process ends, and kill it after ``timeout`` seconds: Python would wait for it when pytest exits.

    Returns:
        Its exit status; negative if a signal killed it.
    """
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode


def _run(output: str, env: dict[str, str], folder: str, target: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.environ.clear()  # of the first process that was started, which the server has kept
    os.environ.update(env)
    os.chdir(folder)
    with open(output, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    target(*args)


def command(*words: str) -> None:
    """Run the command line, as ``python -m wirings`` does."""
    from wirings.__main__ import main

    sys.argv = ["wirings", *words]
    main()


def script(path: Path, *words: str) -> None:
    """Run a file, as ``python`` does."""
    sys.argv = [str(path), *words]
    runpy.run_path(str(path), run_name="__main__")


def rank_environments(world: int) -> list[dict[str, str]]:
    """What torchrun tells each of so many processes on one machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared["GLOO_SOCKET_IFNAME"] = "lo"
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
