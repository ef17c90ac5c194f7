"""Train a small JAX network on all hosts: each host computes a part of a batch, and JAX sums the gradients."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

STEPS, BATCH = 200, 96


def loss_of(params, points, labels):
    """Return the binary cross-entropy of a network that predicts which points lie within a circle."""
    hidden = jax.nn.relu(points @ params["w1"] + params["b1"])
    logits = (hidden @ params["w2"] + params["b2"])[:, 0]
    return jnp.mean(jnp.logaddexp(0, logits) - labels * logits)


@jax.jit
def step_of(params, points, labels):
    loss, gradients = jax.value_and_grad(loss_of)(params, points, labels)
    return jax.tree.map(lambda value, gradient: value - 0.5 * gradient, params, gradients), loss


def main():
    # JAX reads the coordinator's address from JAX_COORDINATOR_ADDRESS, which every job has.
    jax.distributed.initialize(num_processes=int(os.environ["JAX_NUM_PROCESSES"]), process_id=int(os.environ["JAX_PROCESS_ID"]))
    rank, peers = jax.process_index(), jax.process_count()
    mesh = jax.make_mesh((jax.device_count(),), ("hosts",))
    replicated, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("hosts"))
    random = np.random.default_rng(0)  # the same on all hosts
    params = {
        "w1": random.normal(0, 0.5, (2, 32)),
        "b1": np.zeros(32),
        "w2": random.normal(0, 0.2, (32, 1)),
        "b2": np.zeros(1),
    }
    params = jax.device_put(jax.tree.map(np.float32, params), replicated)
    generator = np.random.default_rng(1 + rank)
    for step in range(1, STEPS + 1):
        points = generator.uniform(-1, 1, (BATCH, 2)).astype(np.float32)
        labels = ((points**2).sum(1) < 0.6).astype(np.float32)
        batch = [jax.make_array_from_process_local_data(sharded, part) for part in (points, labels)]
        params, loss = step_of(params, *batch)
        if rank == 0 and step % 50 == 0:
            print(f"step {step} of {peers} peers: loss: {float(loss):.3f}", flush=True)
    if rank == 0:
        np.savez(os.path.join(os.environ["JOB_DIR"], "model.npz"), **jax.tree.map(np.asarray, params))
    multihost_utils.sync_global_devices("saved")


if __name__ == "__main__":
    main()
