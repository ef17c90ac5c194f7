"""Two models made of plain variables; `keep_prob` is below 1 for training and 1 for evaluation."""

import tensorflow.compat.v1 as tf

CLASSES = 10


def _dense(name, inputs, units):
    with tf.variable_scope(name):
        weights = tf.get_variable("weights", [inputs.shape[-1], units], initializer=tf.glorot_uniform_initializer())
        biases = tf.get_variable("biases", [units], initializer=tf.zeros_initializer())
        return tf.matmul(inputs, weights) + biases


def _convolution(name, images, filters):
    """Apply a 5×5 convolution, ReLU, and 2×2 max pooling."""
    with tf.variable_scope(name):
        shape = [5, 5, images.shape[-1], filters]
        weights = tf.get_variable("weights", shape, initializer=tf.glorot_uniform_initializer())
        biases = tf.get_variable("biases", [filters], initializer=tf.zeros_initializer())
        features = tf.nn.relu(tf.nn.conv2d(images, weights, [1, 1, 1, 1], "SAME") + biases)
        return tf.nn.max_pool(features, [1, 2, 2, 1], [1, 2, 2, 1], "SAME")


def cnn(images, keep_prob):
    """Return logits [batch, 10] of a network with two convolutions, of 32 and 64 filters, and 1024 units."""
    hidden = _convolution("conv1", tf.reshape(images, [-1, 28, 28, 1]), 32)
    hidden = _convolution("conv2", hidden, 64)
    hidden = tf.nn.relu(_dense("full", tf.reshape(hidden, [-1, 7 * 7 * 64]), 1024))
    if keep_prob < 1:
        hidden = tf.nn.dropout(hidden, rate=1 - keep_prob)
    return _dense("logits", hidden, CLASSES)


def mlp(images, keep_prob):
    """Return logits [batch, 10] of a network with 128 and 32 units, without dropout for any `keep_prob`."""
    del keep_prob
    hidden = tf.nn.relu(_dense("hidden1", images, 128))
    return _dense("logits", tf.nn.relu(_dense("hidden2", hidden, 32)), CLASSES)


MODELS = {"cnn": cnn, "mlp": mlp}


def metrics(logits, labels):
    """Return the mean cross-entropy and the accuracy, both scalars."""
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), labels), tf.float32))
    return loss, accuracy
