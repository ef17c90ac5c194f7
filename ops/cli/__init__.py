"""The commands of `fab`: functions whose parameters are the flags. Each imports and calls one function of ops.

A command imports its modules only when it runs: so `fab --list` and the first line of a log are as quick as Fabric itself.
"""
