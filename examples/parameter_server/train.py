"""Train as in TensorFlow's parameter server tutorial: with a coordinator, workers that compute, and an evaluator.

Every task runs this file; TF_CONFIG has its type. The model learns which points lie in a circle.
"""

import os

import tensorflow as tf

STEPS = 400
STEPS_PER_CALL = 10
CALLS_PER_CHECKPOINT = 10
BATCH = 128


def points(_=None):
    def label(seed):
        place = tf.random.stateless_uniform([2], tf.stack([seed, 7]), -1.0, 1.0)
        return place, tf.cast(tf.reduce_sum(place**2) < 0.6, tf.float32)

    return tf.data.Dataset.counter().map(lambda n: label(tf.cast(n, tf.int32))).batch(BATCH).prefetch(2)


class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.hidden = tf.Variable(tf.random.stateless_normal([2, 32], [1, 2]), name="hidden")
        self.bias = tf.Variable(tf.zeros([32]), name="bias")
        self.out = tf.Variable(tf.random.stateless_normal([32, 1], [3, 4]) / 6, name="out")
        self.step = tf.Variable(0, dtype=tf.int64, name="step")

    def __call__(self, points_batch):
        return tf.squeeze(tf.nn.relu(points_batch @ self.hidden + self.bias) @ self.out, -1)

    def loss(self, points_batch, labels):
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, self(points_batch)))

    def accuracy(self, points_batch, labels):
        return tf.reduce_mean(tf.cast((self(points_batch) > 0) == (labels > 0.5), tf.float32))


def make_checkpoint_manager(model):
    return tf.train.CheckpointManager(tf.train.Checkpoint(model=model), os.environ.get("JOB_DIR", "output"), 2)


def serve(resolver):
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    print(f"{resolver.task_type} {resolver.task_id} serves", flush=True)
    server.join()


def coordinate(resolver):
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = Model()
    saver = make_checkpoint_manager(model)

    @tf.function
    def steps(iterator):
        for _ in range(STEPS_PER_CALL):
            points_batch, labels = next(iterator)
            with tf.GradientTape() as tape:
                loss = model.loss(points_batch, labels)
            for variable, gradient in zip(
                model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
            ):
                if gradient is not None:
                    variable.assign_sub(0.5 * gradient)
            model.step.assign_add(1)
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(points))
    for _ in range(STEPS // STEPS_PER_CALL // CALLS_PER_CHECKPOINT):
        for _ in range(CALLS_PER_CHECKPOINT):
            last = coordinator.schedule(steps, args=(iterator,))
        coordinator.join()
        print(f"step {model.step.numpy()}: loss: {last.fetch():.3f}", flush=True)
        saver.save()
    points_batch, labels = next(iter(points()))
    accuracy = float(model.accuracy(points_batch, labels))
    print(f"Final metrics after {model.step.numpy()} steps, accuracy: {accuracy:.3f}", flush=True)


def evaluate():
    model = Model()
    saver = make_checkpoint_manager(model)
    points_batch, labels = next(iter(points()))
    for path in tf.train.checkpoints_iterator(saver.directory):
        name = os.path.basename(path)
        try:
            saver.checkpoint.restore(path).expect_partial()
        except (tf.errors.NotFoundError, tf.errors.DataLossError):
            print(f"{name} is gone: the coordinator keeps the newest two", flush=True)
            continue
        print(f"evaluated {name}: accuracy {float(model.accuracy(points_batch, labels)):.3f}", flush=True)


def main():
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        serve(resolver)
    elif resolver.task_type == "evaluator":
        evaluate()
    else:
        coordinate(resolver)


if __name__ == "__main__":
    main()
