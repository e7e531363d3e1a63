"""Compiled networks and threads: forks while they run, and threads that are freed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wirings import engine

pytestmark = [
    pytest.mark.skipif(not engine.available(), reason="there is no C++ compiler"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]

SETUP = """
import multiprocessing, os, threading, time, warnings, torch
from torch import nn
from wirings import engine
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork")
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 4, 1)).eval()
images = torch.randn(3, 3, 64, 64)
"""
RUNNING = """
made = {threads: engine.compile(model, images[:1], engine="sparse", threads=threads) for threads in (1, 2)}
expected = {threads: network(images) for threads, network in made.items()}
ended = threading.Event()

def keep_running():
    while not ended.is_set():
        for network in made.values():
            network(images)

def fine():
    again = engine.compile(model, images[:1], engine="sparse", threads=2)
    return all(torch.equal(network(images), expected[threads]) for threads, network in [*made.items(), (2, again)])

def child():
    os._exit(0 if fine() else 1)

def wait(pid):
    for _ in range(6000):  # a minute: other processes may take the cores
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"

caller = threading.Thread(target=keep_running)
caller.start()
"""


def execute(script: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_fork_while_a_network_runs() -> None:
    """A child computes the same, although a thread that it does not have was running the network."""
    script = """
results = []
for i in range(5):
    time.sleep(0.003 * i)
    pid = os.fork()
    if pid == 0:
        child()
    results.append(wait(pid))
ended.set()
caller.join()
assert results == [0] * 5, results
assert fine(), "the parent goes on"
"""
    execute(SETUP + RUNNING + script)


def test_multiprocessing_with_fork_while_a_network_runs() -> None:
    script = """
context = multiprocessing.get_context("fork")
workers = [context.Process(target=child) for _ in range(3)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join(20)
    worker.kill()
ended.set()
caller.join()
codes = [worker.exitcode for worker in workers]
assert codes == [0, 0, 0], codes
"""
    execute(SETUP + RUNNING + script)


def test_fork_while_edges_are_selected() -> None:
    """The selection kernel runs on OpenMP's threads, which a child does not have."""
    script = """
from wirings.selection import compiled, cpu
compiled.kernel.build()
assert compiled.kernel.library is not None
torch.set_num_threads(2)
weight, k = torch.randn(300_000), torch.tensor(10_000)
expected = cpu.real_edges(weight, k, None)
made = {}

def keep_running():
    while not ended.is_set():
        cpu.real_edges(weight, k, None)

def fine():
    return bytes(cpu.real_edges(weight, k, None).numpy()) == bytes(expected.numpy())
"""
    forks = """
results = []
for i in range(5):
    pid = os.fork()
    if pid == 0:
        child()
    results.append(wait(pid))
ended.set()
caller.join()
assert results == [0] * 5, results
"""
    rest = RUNNING[RUNNING.index("def child") :]
    execute(SETUP + "ended = threading.Event()\n" + script + rest + forks)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_threads_end_with_the_last_network() -> None:
    script = """
from pathlib import Path

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

engine.compile(model, images[:1], engine="sparse", threads=1)(images)
before = threads()
for count in range(2, 5):
    kept = engine.compile(model, images[:1], engine="sparse", threads=count)
    other = engine.compile(model, images[:1], engine="sparse", threads=count)
    kept(images)
    assert threads() == before + count - 1, (count, before, threads())
    del other
    kept(images)
    del kept
    assert threads() == before, (count, before, threads())
"""
    execute(SETUP + script)
