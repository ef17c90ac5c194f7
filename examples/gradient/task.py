"""Learn which points lie in the unit circle, with Paperspace Gradient's TYPE and INDEX: `python -m gradient.task`."""

import argparse
import json
import os
import time

import tensorflow.compat.v1 as tf


def batch(size):
    """Return points of the square around the circle [size, 2], and 1 for each point in the circle [size, 1]."""
    points = tf.random.uniform([size, 2], -1.25, 1.25)
    return points, tf.cast(tf.norm(points, axis=1, keepdims=True) < 1, tf.float32)


def mlp(points, units=16):
    """Return logits [n, 1]."""
    first = tf.get_variable("first", [2, units])
    first_bias = tf.get_variable("first_bias", [units], initializer=tf.zeros_initializer())
    last = tf.get_variable("last", [units, 1])
    last_bias = tf.get_variable("last_bias", [1], initializer=tf.zeros_initializer())
    return tf.matmul(tf.nn.relu(tf.matmul(points, first) + first_bias), last) + last_bias


def train(args, server, cluster, job, index, model_dir):
    """Run asynchronous steps until all replicas together reach `--max-steps`; print a line after each tenth."""
    name, is_chief = f"{os.environ['TYPE']}/{index}", job in ("master", "chief")
    with tf.Graph().as_default():
        with tf.device(tf.train.replica_device_setter(cluster=cluster, worker_device=f"/job:{job}/task:{index}")):
            points, inside = batch(args.batch_size)
            logits = mlp(points)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=inside, logits=logits))
            accuracy = tf.reduce_mean(tf.cast(tf.equal(logits > 0, inside > 0), tf.float32))
            step = tf.train.get_or_create_global_step()
            train_op = tf.train.GradientDescentOptimizer(0.5).minimize(loss, global_step=step)
        # By default a Supervisor sleeps for 30 s, and logs nothing, if the master is not ready.
        supervisor = tf.train.Supervisor(is_chief=is_chief, logdir=model_dir, global_step=step, recovery_wait_secs=1)
        config = tf.ConfigProto(device_filters=["/job:ps", f"/job:{job}/task:{index}"])
        with supervisor.managed_session(server.target, config=config) as session:
            steps, loss_now, accuracy_now = session.run([step, loss, accuracy])  # the checkpoint's values if the job resumes
            began, local_steps, reported = time.time(), 0, -1
            while not supervisor.should_stop() and steps < args.max_steps:
                _, steps, loss_now, accuracy_now = session.run([train_op, step, loss, accuracy])
                local_steps += 1
                if (tenth := 10 * steps // args.max_steps) > reported:
                    reported = tenth
                    print(
                        f"Train [{name}], step {steps}: loss: {loss_now:.3f}, accuracy: {accuracy_now:.3f} "
                        f"({time.time() - began:.3f} sec), {local_steps} steps are mine",
                        flush=True,
                    )
            if is_chief:
                supervisor.saver.save(session, supervisor.save_path, global_step=step)
                print(f"Final metrics after {steps} steps, loss: {loss_now:.3f}, accuracy: {accuracy_now:.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=2000, help="of all replicas together")
    parser.add_argument("--batch-size", type=int, default=100)
    args = parser.parse_args()
    if args.max_steps < 1:
        parser.error("--max-steps must be at least 1")
    tf.disable_v2_behavior()

    # TYPE and INDEX name this task; TF_CONFIG lists all tasks, and by default names the master `chief`.
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    job, index = os.environ["TYPE"], int(os.environ["INDEX"])
    if job == "evaluator":
        print("the evaluator has nothing to do", flush=True)
        return
    if job not in cluster:
        job = "chief"
    server = tf.train.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=index)
    print(f"Started [{os.environ['TYPE']}/{index}]", flush=True)
    if job == "ps":
        server.join()
    train(args, server, cluster, job, index, model_dir=os.environ["JOB_DIR"])


if __name__ == "__main__":
    main()
