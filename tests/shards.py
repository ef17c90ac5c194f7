"""List the shards of `make test-all`, what each needs, and which cheaper tests prove the same as those on hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Shard:
    """Describe a call of pytest.

    Attributes:
        paths: files, folders or node ids, in order.
        needs: what set-up makes for it, beyond what `make test` needs: `browser`, `go` (the emulation of Google's storage),
            or what must be there: `hosts`, `registry`, `root`, which binds port 443 and sets the firewall.
        options: further arguments of pytest.
        parallel: whether its tests may run side by side, one process a core.
        environment: variables of its own.
        cluster: the hosts that it shares with other shards, as one call of pytest runs all shards of a cluster, side by side
            with those of other clusters; `CLUSTER` in the environment of its tests.
    """

    paths: tuple[str, ...]
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    parallel: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    cluster: str = ""


SHARDS: dict[str, Shard] = {
    # Without hosts.
    "here": Shard(("tests/unit", "tests/stack", "tests/contract", "tests/simulation"), parallel=True),
    "processes": Shard(("tests/processes",), parallel=True),
    "storage": Shard(("tests/contract",), needs=("go",), parallel=True, environment={"SCALETIER_STORAGE": "go"}),
    "pages": Shard(("tests/e2e/test_report.py", "tests/e2e/test_draw.py"), needs=("browser",)),
    # On clusters of local hosts.
    "jobs": Shard(("tests/e2e/test_jobs.py", "tests/e2e/test_truth.py"), needs=("hosts",), cluster="e2e"),
    "security": Shard(
        ("tests/e2e/test_hostile.py", "tests/e2e/test_environment.py", "tests/e2e/test_firewall.py"),
        needs=("hosts",),
        cluster="e2e",
    ),
    "stacks": Shard(("tests/e2e/test_stack.py", "tests/e2e/test_team.py"), needs=("hosts",), cluster="e2e-more"),
    "changes": Shard(
        ("tests/e2e/test_keys.py", "tests/e2e/test_doctor.py", "tests/e2e/test_part.py", "tests/e2e/test_disk.py"),
        needs=("hosts",),
        cluster="e2e-more",
    ),
    "strategies": Shard(("tests/e2e/test_strategies.py",), needs=("hosts",), cluster="e2e"),
    "serving": Shard(("tests/e2e/test_serving.py", "tests/e2e/test_batch.py"), needs=("hosts", "browser"), cluster="e2e"),
    "tuning": Shard(("tests/e2e/test_tuning.py", "tests/e2e/test_tutorial.py"), needs=("hosts",), cluster="e2e"),
    "tensorboard": Shard(
        ("tests/e2e/test_tensorboard.py", "tests/e2e/test_reproduce.py"), needs=("hosts", "browser"), cluster="e2e-more"
    ),
    "examples": Shard(("tests/e2e/test_examples.py",), needs=("hosts", "registry"), cluster="e2e-more"),
    "story": Shard(("tests/story",), needs=("hosts",), cluster="story"),
    # On emulated Google hosts, or with records in their place.
    "gcp-cluster": Shard(
        ("tests/gcp_emulation/test_faults.py", "tests/gcp_emulation/test_host.py", "tests/gcp_emulation/test_cluster.py"),
        needs=("hosts", "go", "registry", "root"),
        cluster="google",
    ),
    "gcp-preemption": Shard(
        ("tests/gcp_emulation/test_preemption.py",), needs=("hosts", "go", "registry", "root"), cluster="google"
    ),
    "gcp-changes": Shard(
        ("tests/gcp_emulation/test_changes.py", "tests/gcp_emulation/test_interrupted.py"),
        needs=("go",),
        cluster="google-records",
    ),
}

STACKS: Mapping[str, tuple[str, ...]] = {
    "story": ("story",),
    "e2e": ("e2e", "e2e-second"),
    "e2e-more": ("e2e-more", "e2e-more-second", "e2e-keys", "e2e-renamed"),
}
"""By cluster the Pulumi stacks that its tests create in this checkout."""

_E2E, _UNIT, _STORY = "tests/e2e/", "tests/unit/", "tests/story/test_story.py::"
CHEAPER: dict[str, str] = {
    f"{_E2E}{name}": cheaper
    for name, cheaper in {
        "test_jobs.py::test_arguments_arrive_byte_for_byte": (
            "tests/processes/test_agent_process.py::test_arguments_and_environment_arrive_byte_for_byte"
        ),
        "test_jobs.py::test_cancel_stops_all_replicas_and_keeps_the_log": f"{_STORY}test_the_next_job_starts_after_a_cancel",
        "test_jobs.py::test_one_bundle_explains_why_jobs_failed": f"{_STORY}test_a_failed_job_is_explained_in_one_file",
        "test_jobs.py::test_one_of_two_simultaneous_submissions_waits": (
            f"{_UNIT}test_jobs_queue.py::test_a_job_gets_all_its_hosts_or_none"
        ),
        "test_truth.py::test_clocks_off_by_ten_minutes_change_nothing": (
            "tests/simulation/test_schedules.py::test_no_schedule_breaks_an_invariant"
        ),
        "test_truth.py::test_a_job_waits_for_a_temporarily_stopped_host": (
            f"{_UNIT}test_agent_job_rules.py::test_a_lost_host_fails_the_job_after_max_wait_time"
        ),
        "test_truth.py::test_queued_jobs_start_in_order_without_the_operators_machine": (
            f"{_UNIT}test_jobs_queue.py::test_jobs_are_ordered_by_priority_and_then_time"
        ),
        "test_truth.py::test_a_killed_submission_blocks_no_other_job": (
            f"{_UNIT}test_ops_submit.py::test_leftovers_of_a_killed_fab_train_are_cleared"
        ),
        "test_firewall.py::test_connections_match_the_firewall_table": f"{_STORY}test_connections_match_the_firewall_table",
        "test_part.py::test_a_job_avoids_a_stopped_host": (
            f"{_UNIT}test_ops_submit.py::test_an_unreachable_candidate_is_replaced_by_another"
        ),
        "test_part.py::test_shrinking_a_cluster_under_a_job_needs_consent": (
            f"{_UNIT}test_infra_guard.py::test_a_preview_warns_an_update_refuses_and_disrupt_jobs_cancels"
        ),
        "test_batch.py::test_every_instance_has_one_result_after_a_worker_is_killed": (
            f"{_UNIT}test_batch_task.py::test_a_batch_that_is_killed_anywhere_continues"
        ),
        "test_tuning.py::test_every_trial_ends_after_a_kill_and_a_lost_host": (
            f"{_UNIT}test_tuner_run.py::test_a_trial_of_a_lost_replica_is_run_again"
        ),
        "test_tuning.py::test_a_missing_metric_fails_the_job_and_names_the_reported_one": (
            f"{_UNIT}test_tuner_run.py::test_the_error_of_a_wrong_tag_names_the_reported_metrics"
        ),
        "test_serving.py::test_a_model_that_no_server_can_load": (
            f"{_UNIT}test_ops_models.py::test_a_version_that_no_server_can_load_is_failed"
        ),
        "test_serving.py::test_a_stopped_host_delays_no_deployment_and_loads_it_later": (
            f"{_UNIT}test_ops_models.py::test_an_unreachable_server_is_named_and_blocks_no_deployment"
        ),
    }.items()
}
"""By test on hosts a test of `make test` that proves the same, or its core, for less."""
