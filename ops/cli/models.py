"""Commands on models: deploy their versions, and request predictions."""

from typing import Any

from ops.cli.task import JSON, NEW_JOB, load_cluster, task

MODEL = "name of the model (default: the only one)"
_VERSION_HELP = {"model": MODEL, "version": "one of its versions"}


@task(
    help={
        "model": "name of the model: a letter, then letters, digits and _",
        "version": "a new name, or that of an undeployed or failed version, to load it again",
        "job": "id of the job whose newest exported model is deployed",
        "origin": "folder of a SavedModel on this machine, instead of a job's",
        "json": JSON,
    }
)
def deploy(
    _: Any,
    model: str | None = None,
    version: str | None = None,
    job: str | None = None,
    origin: str | None = None,
    json: bool = False,
) -> int:
    """Deploy a job's model as a version on the cluster's model server; the first version is the default.

    fab deploy --job job01 --model mnist --version v1
    fab deploy --origin export/job01/1700000000 --model mnist --version v2
    fab deploy --model mnist --version v1          # again, after it was undeployed or failed
    """
    from ops.models.deploy import deploy as run

    return run(load_cluster(), model, version, job, origin, json)


@task(help={"json": JSON})
def models(_: Any, json: bool = False) -> int:
    """List the models that were deployed.

    fab models
    fab models --json
    """
    from ops.models.versions import models as run

    return run(load_cluster(), json)


@task(positionals=["model"], help={"model": MODEL, "json": JSON})
def versions(_: Any, model: str | None = None, json: bool = False) -> int:
    """List a model's versions.

    fab versions
    fab versions mnist --json
    """
    from ops.models.versions import versions as run

    return run(load_cluster(), model, json)


@task(positionals=["model", "version"], help={**_VERSION_HELP, "json": JSON})
def set_default(_: Any, model: str | None = None, version: str | None = None, json: bool = False) -> int:
    """Make a version the default for requests that name none. No request fails meanwhile.

    fab set-default mnist v2
    """
    from ops.models.versions import set_default as run

    return run(load_cluster(), model, version, json)


@task(positionals=["model", "version"], help={**_VERSION_HELP, "json": JSON})
def undeploy(_: Any, model: str | None = None, version: str | None = None, json: bool = False) -> int:
    """Remove a version from the model server. It is kept, and fab deploy restores it.

    fab undeploy mnist v1
    """
    from ops.models.versions import undeploy as run

    return run(load_cluster(), model, version, json)


@task(positionals=["model", "version"], help={**_VERSION_HELP, "yes": "do not ask", "json": JSON})
def delete_version(_: Any, model: str | None = None, version: str | None = None, yes: bool = False, json: bool = False) -> int:
    """Delete a version with its files. Its name stays taken. Asks first.

    fab delete-version mnist v1
    fab delete-version mnist v1 --yes
    """
    from ops.models.versions import delete_version as run

    return run(load_cluster(), model, version, yes, json)


@task(
    positionals=["model"],
    help={
        "model": MODEL,
        "version": "one of its versions (default: the model's default)",
        "json-instances": "file with a JSON value on each line, - for stdin",
        "signature": "signature of the model (default: serving_default)",
        "batch": "predict files of the bucket, as a job of the master and the workers",
        "input": "with --batch: the files, such as '/bucket/data/digits/*.json', with a JSON value on each line, or TFRecords; "
        "several separated by commas",
        "output": "with --batch: folder in the bucket for the predictions, new or empty",
        "job": f"with --batch: {NEW_JOB} (default: predict and the time)",
        "replicas": "with --batch: number of replicas that predict (default: by the size of the input)",
        "follow": "with --batch: show the logs until the job ends; --no-follow starts it and returns",
        "json": f"{JSON}; with --batch the job's record",
    },
)
def predict(
    _: Any,
    model: str | None = None,
    version: str | None = None,
    json_instances: str | None = None,
    signature: str | None = None,
    batch: bool = False,
    input_: str | None = None,
    output: str | None = None,
    job: str | None = None,
    replicas: str | None = None,
    follow: bool = True,
    json: bool = False,
) -> int:
    """Print a model's prediction for each instance; or predict a batch.

    fab predict --model mnist --json-instances request.json
    fab predict mnist --version v2 --json-instances - < request.json
    fab predict mnist --batch --input '/bucket/data/mnist/test*' --output /bucket/predictions/test
    """

    with_batch = {"--input": input_, "--output": output, "--job": job, "--replicas": replicas, "--no-follow": not follow}
    if batch or any(with_batch.values()):
        from ops.models import batch as batches

        batches.check_flags(batch, json_instances, with_batch)
        request = batches.BatchOptions(model, version, input_, output, signature, job, replicas)
        return batches.batch(load_cluster(), request, follow, json)
    from ops.models.predict import predict as run

    return run(load_cluster(), model, version, json_instances, signature, json)


@task(positionals=["model"], help={"model": MODEL, "port": "port of this machine (default: 8501, or the next that is free)"})
def serve(_: Any, model: str | None = None, port: str | None = None) -> int:
    """Open a local port to the model server, for curl and other clients, until Ctrl-C.

    fab serve
    fab serve mnist --port 8600
    """
    from ops.models.serve import serve as run

    return run(load_cluster(), model, port)
