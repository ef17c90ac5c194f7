"""Run the trials of a hyperparameter tuning job on each of its hosts, one after another.

To the queue, the leader and the supervisor the tuner is a trainer like any other. There is no coordinator: an idle replica
reads all trial records and takes a trial of its own that has not ended, else one whose replica is lost, else the next number.
Records are created and replaced conditionally, so of two replicas with one number the second decides again. A suggestion is a
pure function of the records, the study and the number, so a killed tuner loses nothing.
"""
