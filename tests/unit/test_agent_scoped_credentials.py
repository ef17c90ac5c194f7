"""A program that fab runs for a job has the rights that the job had, for as long as it runs."""

from __future__ import annotations

import sys
from typing import Any

from hosts.agent.scoped_credentials import PORT, main

_ASK = """
import json, sys, urllib.request
url = f"http://127.0.0.1:{sys.argv[1]}/computeMetadata/v1/instance/service-accounts/default/token"
asked = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
told = json.load(urllib.request.urlopen(asked, timeout=10))
assert told["access_token"] == "narrow", told
sys.exit(3)
"""


def test_a_command_is_lent_the_rights_of_its_output_alone() -> None:
    rules: list[Any] = []

    def mint(asked: Any) -> tuple[str, float]:
        rules.append(asked)
        return "narrow", 3600.0

    assert main(["gs://mine/jobs/job01/output", "--", sys.executable, "-c", _ASK, PORT], mint) == 3
    (found,) = rules
    conditions = {
        rule["availablePermissions"][0]: rule.get("availabilityCondition", {}).get("expression", "") for rule in found
    }
    assert "/buckets/mine/objects/jobs/job01/output/'" in conditions["inRole:roles/storage.objectUser"]
    assert "/buckets/mine/objects/data/'" in conditions["inRole:roles/storage.objectViewer"]
    assert {rule["availableResource"].rpartition("/")[2] for rule in found} == {"mine"}
