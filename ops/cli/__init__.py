"""The commands of `fab`: a function's signature is its flags; it calls one function of ops, imported inside.

So nothing that takes time is imported here: `fab --list` is as quick as Fabric itself, and so is the first line of a log.
"""
