"""tf-keras `fit` with MultiWorkerMirroredStrategy: the chief and the workers take every step together."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's C++ logs a lot about its internals
