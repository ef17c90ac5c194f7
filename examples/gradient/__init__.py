"""Training as Paperspace Gradient starts it: TYPE, INDEX and TF_CONFIG in the environment of every replica."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's C++ has much to say that is about itself
