"""List the shards of `make test-all`: which tests each runs, and what has to be set up for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Describe a call of pytest.

    Attributes:
        paths: files, folders or node ids, in order.
        needs: what set-up makes for it, beyond what `make test` needs: `browser`, `go` (the emulation of Google's storage),
            or what must be there: `hosts`, `registry`.
        options: further arguments of pytest.
        parallel: whether its tests may run side by side, one process a core.
    """

    paths: tuple[str, ...]
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    parallel: bool = False


SHARDS: dict[str, Shard] = {
    "here": Shard(("tests/unit", "tests/stack", "tests/contract", "tests/simulation", "tests/processes"), parallel=True),
    "story": Shard(("tests/story",), needs=("hosts",)),
}
