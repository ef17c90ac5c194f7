"""Batch prediction as a job: the files of the input, cut into shards, through a version of a model, into lines of JSON."""
