"""tf-keras and `fit` under MultiWorkerMirroredStrategy: the chief and the workers take every step together."""
