"""On each host of a job that tunes hyperparameters: runs its trials, one after another."""
