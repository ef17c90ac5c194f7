"""A trainer of another author: it needs no TensorFlow, and its arguments control what it does."""
