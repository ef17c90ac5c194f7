"""Run TensorFlow jobs on the cluster that `pulumi up` made.

`fab COMMAND --help` describes a command. All but serve, shell and tensorboard have --json. Exit codes: 0 done, 1 the job
or the operation failed, 2 the call was wrong and nothing was changed, 130 stopped by Ctrl-C.
"""

from ops.cli.cluster import connect, cost, doctor, hosts, shell, top
from ops.cli.inputs import data, runtimes
from ops.cli.jobs import cancel, delete, describe, jobs, logs, plan, prune, reproduce, train, wait
from ops.cli.models import delete_version, deploy, models, predict, serve, set_default, undeploy, versions
from ops.cli.results import bundle, export, get, report, tensorboard
