"""The included TensorFlow trainer for MNIST or similar images, in one process or on a cluster.

Of this project it imports only the library, scaletier: to write your own trainer, copy it and change `model.py` and `data.py`.
`python -m trainer.records` makes its data, `python -m trainer.task` trains.
"""
