"""A host that cannot be set up reports the failed step and the reason, and `pulumi up` prints both."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cloud import Cloud
from fakes import UNANSWERED
from waiting import limit

FOUR_HOSTS = {
    "scaleTier": "CUSTOM",
    "masterType": "n1-standard-4",
    "workerType": "n1-standard-4",
    "workerCount": "3",
    "readyTimeout": f"{limit(90):.0f}",  # by then three hosts have failed, and the fourth never ends
}
URL = "https://storage.googleapis.com/"
# The fault of each host: a text of its start-up script, and its replacement.
FAULTS = {
    "master-0": (f"\nurl={URL}", f"\nurl={URL}{UNANSWERED[1:]}"),
    "worker-0": ("/runtimes/runtime-", "/runtimes/another-"),
    "worker-1": ("/runtimes/runtime-", "/damaged/runtime-"),
    "worker-2": ("for tool in ", "for tool in no-such-tool "),
}
MESSAGES = (
    rf"not ready after {FOUR_HOSTS['readyTimeout']} s: ",
    rf"worker-0 failed: runtime: {URL}\S+/runtimes/another-\S+ is not there: pulumi up uploads it",
    rf"worker-1 failed: runtime: {URL}\S+ has another sha256 than \w+",
    r"worker-2 failed: image: it has no no-such-tool",
    r"'s serial output ends: .*startup-script",
    r"master-0 preparing: runtime: curl: \(28\) Operation too slow\..*; once more in \d+ s",
)


def test_each_fault_is_reported_with_its_host_and_step(cloud: Cloud) -> None:
    def alter_inputs(inputs: dict[str, Any]) -> None:
        metadata = inputs["metadata"] = dict(inputs["metadata"])
        old, new = FAULTS[inputs["labels"]["scaletier-replica"]]
        assert old in metadata["startup-script"]
        script = metadata["startup-script"] = metadata["startup-script"].replace(old, new)
        if damaged := re.search(rf"\nurl={URL}([^/]+)/(damaged/.*)", script):
            cloud.put(damaged[1], damaged[2], b"half of an archive")

    with pytest.raises(Exception, match="not ready") as error, cloud.up(alter_inputs, **FOUR_HOSTS):
        pass
    for line in MESSAGES:
        assert re.search(line, str(error.value)), f"{line!r} is not in {error.value}"
    remaining = [name for name in cloud.world.deleted_objects if name.startswith("runtimes/")]
    assert not remaining, "a destroyed stack leaves a runtime in the bucket, which then cannot be deleted"
