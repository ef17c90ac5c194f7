"""Training started like Paperspace Gradient's: with TYPE, INDEX and TF_CONFIG in the environment."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's C++ logs a lot about its internals
