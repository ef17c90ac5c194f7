"""The shipped TensorFlow trainer: MNIST by Downpour SGD, on one process or on a ps/master/worker cluster.

An ordinary package that imports nothing of the project: copy it, change `model.py` and `data.py`, and submit your own.
`python -m trainer.records` makes its data, `python -m trainer.task` trains.
"""
