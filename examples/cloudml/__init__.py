"""Between-graph replication with parameter servers, as a trainer for Cloud ML was written in 2017."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's C++ logs a lot about its internals
