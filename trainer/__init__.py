"""The shipped TensorFlow trainer of MNIST or similar images, on one process or a cluster.

An ordinary package that imports the library and nothing else of the project: copy it, change `model.py` and `data.py`, and
submit your own. `python -m trainer.records` makes its data, `python -m trainer.task` trains.
"""
