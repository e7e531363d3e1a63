r"""Train a wired network whose weights are sharded over processes (FSDP2), and resume with any number of processes.

    torchrun --nproc-per-node 2 examples/sharded.py [--steps 300] [--folder sharded_run]

On several machines, run this on each of them:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 \
        examples/sharded.py --folder SHARED_FOLDER
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import wirings
from wirings.cli.comparison import splits

BATCH, SAVE_EVERY = 100, 100


def network() -> nn.Sequential:
    """Uses layer norm, since each process sees only a part of the batch."""
    hidden = [m for _ in range(3) for m in (nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), *hidden, nn.Linear(256, 10))


def main(steps: int, folder: Path) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights on all processes; each then keeps its own rows
    model = network().to(device)
    wiring = wirings.wire_(model, "dnw", density=0.05, share="global")
    wiring.plan(steps)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3
    )  # after fully_shard, since it must hold the sharded weights

    state = {"model": model.state_dict(), "wiring": wiring.state_dict()}
    saved = [path.parent for path in folder.glob("*/.metadata")]  # the last file of a checkpoint to be written
    if saved:  # the optimizer starts afresh, to keep the example short
        dcp.load(state, checkpoint_id=max(saved, key=lambda path: int(path.name)))
        model.load_state_dict(state["model"])
        wiring.load_state_dict(state["wiring"])
        if rank == 0:
            print(f"resuming at step {wiring.steps}")

    digits = splits()[1]
    for step in range(wiring.steps, steps):
        order = torch.randint(len(digits.y), (BATCH,), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = nn.functional.cross_entropy(model(digits.x[order].to(device)), digits.y[order].to(device))
        optimizer.zero_grad()
        loss.backward()
        wiring.clip_grad_norm_(1.0)
        optimizer.step()
        wiring.step(optimizer)
        if (step + 1) % SAVE_EVERY == 0:
            dcp.save({"model": model.state_dict(), "wiring": wiring.state_dict()}, checkpoint_id=folder / str(step + 1))

    with torch.no_grad():  # on all processes, since each holds a part of the weights
        right = (model(digits.x_test.to(device)).argmax(1).cpu() == digits.y_test).float().mean()
    table = str(wiring)
    if rank == 0:
        print(f"{table}\ntest accuracy {100 * right:.1f} % after {wiring.steps} steps")
    if not on_gpu:  # gloo's threads release their tensors a moment later, and must do so before Python exits
        time.sleep(0.5)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("sharded_run"))
    options = parser.parse_args()
    main(options.steps, options.folder)
