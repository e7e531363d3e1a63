"""A stand-in for a training run that takes no time and succeeds, fails, hangs or is killed, as a test asks."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def pretend_to_train(out: Path, starts: int, speeds: str, total: str, fate: str = "") -> None:
    """Make steps until there are ``total``. All runs on the device share the speed that their number has."""
    shared, steps, before, most = Path(os.environ["WIRINGS_SHARING"]), 0.0, time.time(), 0
    while steps < int(total):
        time.sleep(0.02)
        runs, now = json.loads(shared.read_text())["runs"], time.time()
        curve = [float(speed) for speed in speeds.split(",")]
        steps += 1000 * (now - before) * curve[min(runs, len(curve)) - 1] / runs
        before, most = now, max(most, runs)
        (out / ".part").write_text(json.dumps({"time": now, "steps": int(steps), "epoch": int(steps) // 50}))
        os.replace(out / ".part", out / "progress.json")
        if fate == "dies" and starts == 1 and runs > 1 and steps > 300:
            os.kill(os.getpid(), signal.SIGKILL)
        if fate.startswith("memory") and runs > int(fate.removeprefix("memory")):
            sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        if fate == "fault" and starts == 1 and runs > 1:
            sys.exit("RuntimeError: CUDA error: an illegal memory access was encountered")
    (out / "most").write_text(str(most))
    (out / "environment").write_text(json.dumps(dict(os.environ)))


def main(template: Path, out: Path, how: str) -> None:
    with (out / "starts").open("a") as file:
        file.write("once\n")
    starts = len((out / "starts").read_text().splitlines())
    (out / "log.csv").write_text("epoch,train_loss,accuracy,seconds\n1,0.5,12.5,3.0\n")
    if how.startswith("train"):
        pretend_to_train(out, starts, *how.split()[1:])
    if how == "diverge":
        sys.exit("training diverged at step 3 (lr 4): the loss is not finite. Lower optimizer.lr.")
    if how.startswith("gives"):
        result = json.loads(template.read_text()) | {"accuracy": float(how.split()[1])}
        (out / "result.json").write_text(json.dumps(result))
        (out / "last.safetensors").touch()
        return
    if how == "fail":
        sys.exit("failed for a reason")
    if how == "killed" or (how == "killed once" and starts == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "terminated once" and starts == 1:
        sys.exit(128 + signal.SIGTERM)  # as a run does that has saved a checkpoint
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (out / "deaf").touch()
    if how in ("hang", "stubborn"):
        time.sleep(600)
    if how != "time is up":
        (out / "last.safetensors").touch()
        shutil.copy(template, out / "result.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
