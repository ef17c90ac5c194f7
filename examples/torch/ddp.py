"""Trains by PyTorch's DistributedDataParallel on CPUs (gloo), with MASTER_ADDR and RANK as rendezvous."""

import os

import fsspec  # PyTorch brings it; it also writes to gs://
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 200


def main():
    dist.init_process_group("gloo")  # env:// is its default, and the cluster has set it
    rank, peers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    loss_of = torch.nn.BCEWithLogitsLoss()
    points = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        places = torch.rand(96, 2, generator=points) * 2 - 1
        loss = loss_of(model(places).squeeze(1), ((places**2).sum(1) < 0.6).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step} of {peers} peers: loss {loss.item():.3f}", flush=True)
    if rank == 0:
        with fsspec.open(os.path.join(os.environ["JOB_DIR"], "model.pt"), "wb") as file:
            torch.save(model.module.state_dict(), file)
    dist.barrier()  # the job ends with rank 0, and the others are to have ended theirs by then
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
