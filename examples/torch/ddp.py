"""Train by PyTorch's DistributedDataParallel on CPUs (gloo); the processes meet by MASTER_ADDR and RANK."""

import os

import fsspec  # a dependency of PyTorch; with gcsfs it also writes to gs://
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 200


def main():
    dist.init_process_group("gloo")  # it reads MASTER_ADDR, RANK and so on, which every job has
    rank, peers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    loss_of = torch.nn.BCEWithLogitsLoss()
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        batch = torch.rand(96, 2, generator=generator) * 2 - 1
        loss = loss_of(model(batch).squeeze(1), ((batch**2).sum(1) < 0.6).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step} of {peers} peers: loss: {loss.item():.3f}", flush=True)
    if rank == 0:
        with fsspec.open(os.path.join(os.environ["JOB_DIR"], "model.pt"), "wb") as file:
            torch.save(model.module.state_dict(), file)
    dist.barrier()  # the job ends when rank 0 ends, so wait for the other ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
