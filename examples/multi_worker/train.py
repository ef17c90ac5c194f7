"""Train as in TensorFlow's multi-worker tutorial: each worker computes a part of a batch, and all take the same step."""

import os

import tensorflow as tf

STEPS = 60
BATCH = 96


def batches(context):
    """Return the worker's own part of the data: points, and 1 for each point that lies in a circle."""
    seeds = tf.data.Dataset.range(context.input_pipeline_id, 10**9, context.num_input_pipelines)

    def batch(seed):
        points = tf.random.stateless_uniform([context.get_per_replica_batch_size(BATCH), 2], tf.stack([seed, 7]), -1.0, 1.0)
        return points, tf.cast(tf.reduce_sum(points**2, axis=1) < 0.6, tf.float32)

    return seeds.map(batch)


def main():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    chief = resolver.task_type in (None, "chief")
    with strategy.scope():
        hidden = tf.Variable(tf.random.stateless_normal([2, 32], [1, 2]))
        bias = tf.Variable(tf.zeros([32]))
        out = tf.Variable(tf.random.stateless_normal([32, 1], [3, 4]) / 6)
    variables = (hidden, bias, out)

    def logits(points):
        return tf.squeeze(tf.nn.relu(points @ hidden + bias) @ out, -1)

    def step(points, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits(points)))
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, variables))
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.5 * gradient)
        return loss

    @tf.function
    def train(batch):
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(step, args=batch), axis=None)

    data = iter(strategy.distribute_datasets_from_function(batches))
    print(f"{resolver.task_type} {resolver.task_id} is one of {strategy.num_replicas_in_sync}", flush=True)
    for number in range(1, STEPS + 1):
        loss = train(next(data))
        if number % 20 == 0:
            print(f"step {number}: loss: {loss:.3f}", flush=True)
    points = tf.random.stateless_uniform([1000, 2], [1, 7], -1.0, 1.0)
    correct = (logits(points) > 0) == (tf.reduce_sum(points**2, axis=1) < 0.6)
    accuracy = float(tf.reduce_mean(tf.cast(correct, tf.float32)))
    if chief:
        tf.train.Checkpoint(hidden=hidden, bias=bias, out=out).write(os.path.join(os.environ.get("JOB_DIR", "output"), "model"))
        print(f"Final metrics after {STEPS} steps, accuracy: {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
