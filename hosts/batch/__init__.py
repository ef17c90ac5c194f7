"""Predict a batch as a job: run shards of the input files through a model's version.

The results are lines of JSON. The request lists the input files and the model's files with their hashes, so that every replica
and every restart has the same. The chief inspects the head of each file; from then on arithmetic assigns byte ranges of the
files to the replicas (`shards`), and one file per shard, written last, marks it as done.
"""
