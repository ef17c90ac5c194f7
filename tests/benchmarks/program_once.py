"""`python -m benchmarks.program_once HOSTS`: CPU seconds of the Pulumi program under Pulumi's mocks.

The program is Google Cloud's.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time

from benchmarks.stack import ROOT
from infra.gcp import target


def seconds(hosts: int) -> float:
    """Return the CPU seconds of this process, once, for a master and workers: other load does not count."""
    mocks = importlib.import_module("stackmocks")
    config = {"target": "gcp", "scaleTier": "CUSTOM", "masterType": "n1-highcpu-8"}
    config |= {"workerType": "n1-highcpu-8", "workerCount": str(hosts - 1)}
    place = {"gcp:project": mocks.PROJECT, "gcp:zone": mocks.ZONE}
    os.environ["PULUMI_CONFIG"] = json.dumps(place | {f"scaletier:{key}": value for key, value in config.items()})
    began = time.process_time()
    stack = mocks.declared(lambda: runpy.run_path(str(ROOT / "infra" / "__main__.py"), run_name="infra.__main__"))
    took = time.process_time() - began
    if len(stack.of("Instance")) != hosts:
        raise RuntimeError(f"the program declares {len(stack.of('Instance'))} hosts, not {hosts}")
    return took


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests" / "stack"))
    vars(target)["preflight"] = lambda *_: None  # nothing is asked of Google
    seconds(1)  # imports
    print(seconds(int(sys.argv[1])))
