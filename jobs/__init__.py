"""Everything that is said about a job: records, states, paths in the bucket, the store, leases and the queue.

`ops` and `replica` both go by it, so it runs on hosts too: standard library, and fsspec where a bucket is a URL.
"""
