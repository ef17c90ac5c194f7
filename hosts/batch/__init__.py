"""Predict a batch as a job: run shards of the input files through a version of a model.

The results are lines of JSON. The request lists the input files and the model's files with their hashes, so that every replica
and every restart uses the same ones. The chief inspects the head of each file. Each replica then computes its shards, byte
ranges of the files, without a coordinator (`shards`). One file per shard, written last, marks the shard as done.
"""
