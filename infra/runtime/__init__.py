"""The hosts' Python with TensorFlow: its packages and its build, for hosts on every target."""
