"""Serve models: the server that answers requests for the models in the bucket, below models/.

A model is one record, `models/<model>/model.json`, with all its versions and the name of the default; only conditional writes
change it (`jobs.model_catalog`). A deployment claims its name (CREATING), copies the files, records their hashes, and makes the
version READY when the servers have loaded it. A killed deployment leaves a version that is CREATING or FAILED and is never
served.

The server writes nothing. It compares the record with what it has loaded, verifies a version's files by their hashes, loads it,
and then replaces one immutable value, so that a request sees the state either before or after a change. Each model computes in
its own thread; requests that arrive meanwhile are batched for the next computation (`batcher`). Servers do not know one
another. After a failure a client tries another server, since a prediction has no side effects: so there is no load balancer.
"""
