"""Jobs on parts of a cluster run side by side, each with a TF_CONFIG of its own replicas."""

from __future__ import annotations

from stacks import ENDLESS, TINY, Stack


def placement(cluster: Stack, job_id: str) -> dict[str, str]:
    record = cluster.describe(job_id)
    return dict(zip(record["candidates"], record["hosts"], strict=True))


def test_a_larger_job_queues_behind_one_host_jobs(cluster: Stack) -> None:
    for job_id in ("side1", "side2"):
        result = cluster.fab("train", job_id, *TINY, "--scale-tier", "BASIC", *ENDLESS)
        assert f"{job_id} is started" in result.out, result.text
    assert [placement(cluster, job_id) for job_id in ("side1", "side2")] == [{"master-0": "master-0"}, {"master-0": "worker-0"}]
    jobs = {host["name"]: (host["job"], host["replica"]) for host in cluster.json("hosts")["hosts"]}
    assert (jobs["worker-0"], jobs["worker-1"]) == (("side2", "master-0"), (None, None))
    queued = cluster.fab("train", "side3", *TINY, "--replicas", "worker=1,ps=1", *ENDLESS)
    assert "side3 is QUEUED behind side1, side2" in queued.out
    last = cluster.fab("train", "side4", *TINY, "--replicas", "master", "--no-follow", "--", "--seconds", "1")
    assert "side4 is QUEUED" in last.out, "it may not use the hosts that side3 waits for"
    refused = cluster.fab("train", "side5", *TINY, "--replicas", "worker", "--no-queue", "--", "--seconds", "1")
    assert (refused.code, "hosts that it needs are job side" in refused.err) == (2, True)
    cluster.must("cancel", "side2")
    cluster.finish_job("side3", replicas=3)
    cluster.must("wait", "side3")
    assert cluster.describe("side1")["state"] == "RUNNING"
    assert placement(cluster, "side3") == {"master-0": "worker-0", "ps-0": "ps-0", "worker-0": "worker-1"}
    log = cluster.fab("logs", "worker-0", "side3", "--lines", "all").out
    peers = {"ps": "ps-0", "chief": "worker-0", "worker": "worker-1"}
    assert f"cluster { ({role: [f'{cluster.addresses[host]}:2222'] for role, host in peers.items()}) }" in log
    assert "'type': 'worker', 'index': 0" in log
    cluster.must("wait", "side4")
    cluster.must("cancel", "side1")
    wrong = cluster.fab("logs", "worker-1", "side1")
    assert (wrong.code, "job side1 has no replica 'worker-1'; valid are master-0, master, all" in wrong.err) == (2, True)


def test_a_job_avoids_a_stopped_host(cluster: Stack) -> None:
    cluster.stop("master-0")
    try:
        result = cluster.fab("train", "without", *TINY, "--scale-tier", "BASIC", "--", "--seconds", "1")
        assert (result.code, "master-0" in result.err, placement(cluster, "without")) == (0, True, {"master-0": "worker-0"})
    finally:
        cluster.start_host("master-0")


def test_shrinking_a_cluster_under_a_job_needs_consent(cluster: Stack) -> None:
    cluster.must("train", "shrinks", *TINY, "--replicas", "worker", *ENDLESS)
    cluster.configure(workerCount="1")
    try:
        warning = "this removes worker-1, and job shrinks has worker-1"
        assert f"{warning}: pulumi up will refuse" in cluster.run("pulumi", "preview", "--non-interactive").text
        refused = cluster.run("pulumi", "up", "--yes", "--skip-preview", "--non-interactive")
        assert (refused.code != 0, f"{warning}: nothing was changed" in refused.text) == (True, True), refused.text
        assert "worker-1" in cluster.hosts()
        assert cluster.describe("shrinks")["state"] == "RUNNING"
        cluster.configure(disruptJobs="true")
        assert "disruptJobs is true, so it is done; shrinks ends" in cluster.up()
        assert "worker-1" not in cluster.hosts()
        cluster.wait("shrinks", "CANCELLED")
        assert "by pulumi up: hosts removed or replaced: worker-1" in cluster.fab("describe", "shrinks").out
    finally:
        cluster.pulumi("config", "rm", "disruptJobs")
        cluster.configure(workerCount="2")
        cluster.up()
    assert cluster.changes() == {}
