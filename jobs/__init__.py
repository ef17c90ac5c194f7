"""Shared code about a job: records, states, paths, the bucket, leases and the queue.

Both `ops` and `hosts` import it, so it also runs on hosts: standard library, and Google's client if the bucket is there.
"""
