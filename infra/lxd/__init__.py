"""The local target: hosts are LXD or Incus instances on the machine in front of you."""
