"""A host that cannot become one says which step failed and why, and `pulumi up` says it on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cloud import Cloud
from fakes import MUTE
from waiting import limit

FOUR = {
    "scaleTier": "CUSTOM",
    "masterType": "n1-standard-4",
    "workerType": "n1-standard-4",
    "workerCount": "3",
    "readyTimeout": f"{limit(90):.0f}",  # three hosts are to have failed by then, and the fourth never ends
}
URL = "https://storage.googleapis.com/"
# What is broken on each host: a text of its start-up script, and what is there in its place.
SPOILED = {
    "master-0": (f"\nurl={URL}", f"\nurl={URL}{MUTE[1:]}"),
    "worker-0": ("/runtimes/runtime-", "/runtimes/another-"),
    "worker-1": ("/runtimes/runtime-", "/damaged/runtime-"),
    "worker-2": ("for tool in ", "for tool in no-such-tool "),
}
SAID = (
    rf"not ready after {FOUR['readyTimeout']} s: ",
    rf"worker-0 failed: runtime: {URL}\S+/runtimes/another-\S+ is not there: pulumi up uploads it",
    rf"worker-1 failed: runtime: {URL}\S+ has another sha256 than \w+",
    r"worker-2 failed: image: it has no no-such-tool",
    r"'s serial output ends: .*startup-script",
    r"master-0 preparing: runtime: curl: \(28\) Operation too slow\..*; once more in \d+ s",
)


def test_each_fault_is_named_with_its_host_and_its_step(cloud: Cloud) -> None:
    def spoil(inputs: dict[str, Any]) -> None:
        metadata = inputs["metadata"] = dict(inputs["metadata"])
        old, new = SPOILED[inputs["labels"]["scaletier-replica"]]
        assert old in metadata["startup-script"]
        script = metadata["startup-script"] = metadata["startup-script"].replace(old, new)
        if damaged := re.search(rf"\nurl={URL}([^/]+)/(damaged/.*)", script):
            cloud.put(damaged[1], damaged[2], b"half of an archive")

    with pytest.raises(Exception, match="not ready") as error, cloud.up(spoil, **FOUR):
        pass
    for line in SAID:
        assert re.search(line, str(error.value)), f"{line!r} is not in {error.value}"
    left = [name for name in cloud.world.taken if name.startswith("runtimes/")]
    assert not left, "what is destroyed leaves its Python in the bucket, which then cannot go"
