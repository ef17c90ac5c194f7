"""Run the trials of a hyperparameter tuning job on each of its hosts, one after another.

To the queue, the leader and the supervisor the tuner is a trainer like any other. There is no coordinator: an idle replica
reads all trial records and claims a trial of its own that has not ended, else one of a lost replica, else a new one with the
next number. Records are created and replaced conditionally: if two replicas claim the same number, one fails and chooses again.
A suggestion is a pure function of the records, the study and the number, so a killed tuner loses nothing.
"""
