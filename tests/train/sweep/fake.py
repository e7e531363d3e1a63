"""A stand-in for a training run that takes no time and succeeds, fails, hangs or is killed, as a test asks."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path


def main(template: Path, out: Path, how: str) -> None:
    with (out / "starts").open("a") as file:
        file.write("once\n")
    starts = len((out / "starts").read_text().splitlines())
    (out / "log.csv").write_text("epoch,train_loss,accuracy,seconds\n1,0.5,12.5,3.0\n")
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
