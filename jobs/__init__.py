"""Shared code about jobs and models: records, states, paths, the bucket, leases, the queue, rights of tokens.

Both `ops` and `hosts` import it, so it also runs on hosts: standard library, and Google's client if the bucket is there.
"""
