"""Training as Paperspace Gradient starts it: TYPE, INDEX and TF_CONFIG in the environment of every replica."""
