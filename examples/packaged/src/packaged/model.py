"""Fit a straight line to noisy points."""

import tensorflow as tf

SLOPE, INTERCEPT = 3.0, -1.0


class Line(tf.Module):
    def __init__(self):
        super().__init__()
        self.slope, self.intercept = tf.Variable(0.0), tf.Variable(0.0)

    def __call__(self, x):
        return self.slope * x + self.intercept


@tf.function
def step(line, learning_rate, batch_size):
    """Run one step of gradient descent on fresh points; return the loss."""
    x = tf.random.uniform([batch_size], -1, 1)
    y = SLOPE * x + INTERCEPT + tf.random.normal([batch_size], stddev=0.1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((line(x) - y) ** 2)
    for variable, gradient in zip(line.trainable_variables, tape.gradient(loss, line.trainable_variables), strict=True):
        variable.assign_sub(learning_rate * gradient)
    return loss
