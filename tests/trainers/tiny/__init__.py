"""A trainer package that is not ours: it needs no TensorFlow, and does what its arguments say."""
