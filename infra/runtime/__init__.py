"""The hosts' Python with TensorFlow: what is in it, and how it is made, for hosts on every target."""
