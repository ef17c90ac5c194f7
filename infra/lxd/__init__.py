"""The local target: hosts are LXD or Incus instances on this machine."""
