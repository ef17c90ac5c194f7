"""Run the task that TF_CONFIG names, or train in one process without a cluster: `python -m cloudml.task`."""

import argparse
import json
import os
import time

import tensorflow.compat.v1 as tf

from cloudml import data
from cloudml.model import MODELS, metrics


class Report(tf.train.SessionRunHook):
    """Print a line about every second with metrics and the steps/s of this replica and of the cluster."""

    def __init__(self, replica, step, loss, accuracy):
        self.replica = replica
        self.tensors = {"step": step, "loss": loss, "accuracy": accuracy}
        self.began = self.last_time = time.time()
        self.local = self.last_local = 0
        self.last_step = None

    def before_run(self, _):
        return tf.train.SessionRunArgs(self.tensors)

    def after_run(self, _, run_values):
        values, now = run_values.results, time.time()
        self.local += 1
        if self.last_step is None:  # do not count the steps of other replicas before this one joined
            self.began, self.last_time, self.last_step, self.last_local = now, now, int(values["step"]), self.local
            return
        seconds = now - self.last_time
        if seconds < 1:
            return
        rates = (values["step"] - self.last_step) / seconds, (self.local - self.last_local) / seconds
        print(
            f"Train [{self.replica}], step {values['step']}: loss: {values['loss']:.3f}, accuracy: {values['accuracy']:.3f} "
            f"({now - self.began:.3f} sec) {rates[0]:.1f} global steps/s, {rates[1]:.1f} local steps/s",
            flush=True,
        )
        self.last_time, self.last_step, self.last_local = now, int(values["step"]), self.local


class FinalEvaluation(tf.train.SessionRunHook):
    """Print the master's last line: loss and accuracy on all test data."""

    def __init__(self, step, loss, accuracy):
        self.tensors = [loss, accuracy]
        self.step = step

    def end(self, session):
        batches = []
        while True:
            try:
                batches.append(session.run(self.tensors))
            except tf.errors.OutOfRangeError:
                break
        loss, accuracy = (sum(values) / len(batches) for values in zip(*batches, strict=True))
        steps = session.run(self.step)
        print(f"Final metrics after {steps} steps, loss: {loss:.3f}, accuracy: {accuracy:.3f}", flush=True)


def checkpoint_arguments(steps):
    """Return arguments of a session that keeps a checkpoint of every `steps` steps; with None TensorFlow's defaults."""
    if not steps:
        return {}
    scaffold = tf.train.Scaffold(saver=tf.train.Saver(max_to_keep=None, sharded=True))
    return {"scaffold": scaffold, "save_checkpoint_secs": None, "save_checkpoint_steps": steps}


def train(args, target, replica, device, is_chief, config):
    """Build the graph, its variables on the parameter servers, and train until all replicas together reach `--max-steps`."""
    with tf.Graph().as_default(), tf.device(device):
        step = tf.train.get_or_create_global_step()
        images, labels = data.train_batch(args.data, args.batch_size, seed=args.seed)
        with tf.variable_scope("model"):
            loss, accuracy = metrics(MODELS[args.model](images, 0.5), labels)
        train_op = tf.train.AdamOptimizer(args.learning_rate).minimize(loss, global_step=step)
        hooks = [tf.train.StopAtStepHook(last_step=args.max_steps), Report(replica, step, loss, accuracy)]
        if is_chief:
            tf.summary.scalar("loss", loss)
            tf.summary.scalar("accuracy", accuracy)
            images, labels = data.test_batch(args.data)
            with tf.variable_scope("model", reuse=True):
                hooks.append(FinalEvaluation(step, *metrics(MODELS[args.model](images, 1.0), labels)))
        with tf.train.MonitoredTrainingSession(
            target,
            is_chief,
            checkpoint_dir=args.job_dir,
            hooks=hooks,
            config=config,
            **checkpoint_arguments(args.checkpoint_steps),
        ) as session:
            while not session.should_stop():
                session.run(train_op)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(MODELS), default="cnn")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--max-steps", type=int, default=2000, help="of all replicas together")
    parser.add_argument("--learning-rate", type=float, default=0.001)
    parser.add_argument("--checkpoint-steps", type=int, help="steps between two checkpoints; all checkpoints are kept")
    parser.add_argument("--data", default=os.environ.get("SCALETIER_DATA", ".cache/mnist"), help="folder of TFRecords")
    parser.add_argument("--job-dir", default=os.environ.get("JOB_DIR", "output"), help="for checkpoints and summaries")
    args = parser.parse_args()
    tf.disable_v2_behavior()

    env = json.loads(os.environ.get("TF_CONFIG", "{}"))
    task = env.get("task") or {"type": "master", "index": 0}
    job, index = task["type"], task["index"]
    args.seed = index + (job == "worker")  # each replica reads the data in another order
    if job == "evaluator":
        print("the evaluator has nothing to do: the master evaluates", flush=True)
        return
    if not env.get("cluster"):
        train(args, "", "master/0", None, True, None)
        return
    cluster = tf.train.ClusterSpec(env["cluster"])
    server = tf.train.Server(cluster, job_name=job, task_index=index)
    print(f"Started [{job}/{index}]", flush=True)
    if job == "ps":
        server.join()
    # Each replica connects only to the parameter servers, so it does not wait for other workers.
    config = tf.ConfigProto(device_filters=["/job:ps", f"/job:{job}/task:{index}"])
    device = tf.train.replica_device_setter(cluster=cluster, worker_device=f"/job:{job}/task:{index}")
    train(args, server.target, f"{job}/{index}", device, job == "master", config)


if __name__ == "__main__":
    main()
