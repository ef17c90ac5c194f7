"""The keys of config.yaml, with Cloud ML's names where it has the key, and the type of each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic.alias_generators import to_snake

from infra.validation import Section, refusal
from jobs.paths import JOB_ID
from jobs.study import Algorithm, ParameterType, ScaleType
from ops.config_values import Count, Notify, RunPolicy, Seconds, Size, StrictBool, Whole, refuse_bool
from ops.errors import UsageError
from ops.submit import arguments

_LABEL_KEY = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_MOST_TRIALS = 1000
_LARGEST = 1e300
_LARGEST_INTEGER = 2**53
_PARAMETER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ROLE_CONFIG = "pulumi config set acceleratorType gives hosts GPUs, and runtime a job its packages, instead of an image"
_LOG_SCALES = (ScaleType.UNIT_LOG_SCALE, ScaleType.UNIT_REVERSE_LOG_SCALE)
# The keys that define a hyperparameter's values, by its type.
_VALUES = {
    ParameterType.DOUBLE: ("minValue", "maxValue"),
    ParameterType.INTEGER: ("minValue", "maxValue"),
    ParameterType.CATEGORICAL: ("categoricalValues",),
    ParameterType.DISCRETE: ("discreteValues",),
}
_Item = TypeVar("_Item")


def check_job_id(job_id: str) -> None:
    """Check a job id by Cloud ML's rule; UsageError if it breaks the rule."""
    if not JOB_ID.fullmatch(job_id):
        rule = "a letter, then letters, digits and underscores, 128 in all at most"
        raise UsageError(f"job id {job_id!r} breaks the rule: {rule}, such as job01")


def in_snake_case(value: Any) -> Any:
    """Return a trainingInput with its keys in snake_case, as in Cloud ML's TF_CONFIG; names in `environment` stay."""
    if isinstance(value, Mapping):
        return {to_snake(key): item if key == "environment" else in_snake_case(item) for key, item in value.items()}
    return [in_snake_case(item) for item in value] if isinstance(value, list) else value


def check_labels(labels: dict[str, str]) -> dict[str, str]:
    """Check labels by Google Cloud's rules; ValueError for one that breaks them."""
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            rule = "lower-case letters, digits, - and _, 63 at most, the key starting with a letter"
            raise ValueError(f"label {key}={value} breaks the rule: {rule}")
    return labels


def _version(value: Any) -> Any:
    """Check a version, which must be quoted: YAML reads 2.20 as the number 2.2. Versions 1.x are ignored later."""
    if isinstance(value, float) and value >= 2 and len(repr(value)) == len("2.2"):
        raise ValueError(f'{value!r} or {value!r}0? YAML makes one number of both: quote it, "{value!r}0"')
    return value


def _number(value: float) -> float:
    if not abs(value) <= _LARGEST:
        raise ValueError(f"must be a number of at most {_LARGEST:g} either way")
    return value


def _distinct(values: list[_Item]) -> list[_Item]:
    if not values:
        raise refusal("is empty: name the values that are to be tried")
    if twice := [value for index, value in enumerate(values) if value in values[:index]]:
        raise refusal(f"has {twice[0]!r} twice: say it once")
    return values


def _word(text: str) -> str:
    if "\0" in text:
        raise refusal("holds a NUL character, which no program can receive")
    return text


def _parameter_name(name: str) -> str:
    """Check a name, from which the trial's flag is made."""
    name = name.removeprefix("--")
    if not _PARAMETER_NAME.fullmatch(name):
        raise ValueError("it is no name of a flag. Valid: letters, digits, _ and -, such as learning-rate")
    if arguments.has_output_flag([f"--{name}"]):
        raise ValueError("it is a trial's output, which each trial gets by itself: tune something else")
    return name


def _metric_tag(tag: str) -> str:
    if not tag.strip() or not tag.isprintable():
        raise ValueError("it is no name of a metric, such as accuracy")
    return tag


_REQUIRED = "a hyperparameter has a parameterName and a type"
_Labels = Annotated[dict[str, str], AfterValidator(check_labels)]
# A string of a number is valid, too: Google's config files have such, and YAML reads 1e-4 as a string.
_Number = Annotated[float, BeforeValidator(refuse_bool), AfterValidator(_number)]
_Trials = Annotated[Whole, Field(ge=1, le=_MOST_TRIALS)]


class HyperparameterSpec(Section):
    """A hyperparameter of a tuning job."""

    parameterName: Annotated[str, AfterValidator(_parameter_name)] = Field(description=_REQUIRED)
    type: ParameterType = Field(description=_REQUIRED)
    minValue: _Number | None = None
    maxValue: _Number | None = None
    categoricalValues: Annotated[list[Annotated[str, AfterValidator(_word)]], AfterValidator(_distinct)] | None = None
    # Sorted, because the tuner draws values by their index.
    discreteValues: Annotated[list[_Number], AfterValidator(_distinct), AfterValidator(sorted)] | None = None
    scaleType: ScaleType = ScaleType.NONE

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        keys, present = _VALUES[self.type], self.model_fields_set
        has = f"one of type {self.type} has {' and '.join(keys)}"
        if missing := [key for key in keys if key not in present]:
            raise refusal(f"is missing: {has}", missing[0])
        if other := [key for others in _VALUES.values() for key in others if key in present and key not in keys]:
            raise refusal(f"goes with another type: {has}", other[0])
        if self.minValue is not None and self.maxValue is not None:
            self._check_range(self.minValue, self.maxValue)
        elif self.type is ParameterType.CATEGORICAL and self.scaleType is not ScaleType.NONE:
            raise refusal(f"is {self.scaleType}, and words have no scale: take it out", "scaleType")
        return self

    def _check_range(self, low: float, high: float) -> None:
        if self.type is ParameterType.INTEGER:
            if broken := [each for each in (low, high) if not each.is_integer()]:
                raise refusal(f"is of type INTEGER, and {broken[0]:g} is no whole number; DOUBLE has such")
            if max(abs(low), abs(high)) > _LARGEST_INTEGER:
                raise refusal(f"has a number above {_LARGEST_INTEGER}, which cannot be passed exactly: scale it")
        if low >= high:
            raise refusal(f"{low:g} is not below maxValue {high:g}: swap them, or take the parameter out", "minValue")
        if self.scaleType in _LOG_SCALES and low <= 0:
            raise refusal(f"{low:g} has no logarithm, and scaleType is {self.scaleType}: take one above 0", "minValue")


def _parameters(params: list[HyperparameterSpec]) -> list[HyperparameterSpec]:
    if not params:
        raise refusal("must be a list of hyperparameters, each with parameterName, type and values, not []")
    names = [each.parameterName.replace("_", "-") for each in params]
    if twice := [name for index, name in enumerate(names) if name in names[:index]]:
        raise refusal(f"has the parameterName {twice[0]!r} twice: say it once")
    return params


class Hyperparameters(Section):
    """`trainingInput.hyperparameters`; without a goal, or with GOAL_TYPE_UNSPECIFIED, Cloud ML maximized."""

    goal: Literal["MAXIMIZE", "MINIMIZE", "GOAL_TYPE_UNSPECIFIED"] | None = None
    params: Annotated[list[HyperparameterSpec], AfterValidator(_parameters)] = Field(
        description="say which hyperparameters are to be tuned"
    )
    hyperparameterMetricTag: Annotated[str, AfterValidator(_metric_tag)] | None = None
    maxTrials: _Trials = 1
    maxParallelTrials: _Trials | None = None
    maxFailedTrials: Count | None = None
    algorithm: Algorithm | None = None
    enableTrialEarlyStopping: StrictBool | None = None
    resumePreviousJobId: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.algorithm is Algorithm.GRID_SEARCH:
            for index, parameter in enumerate(self.params):
                if parameter.type is ParameterType.DOUBLE:
                    raise refusal(
                        f"{parameter.parameterName} is of type DOUBLE, of which there is no grid: "
                        "name its values as DISCRETE, or take another algorithm",
                        f"params[{index}]",
                    )
        if (self.maxFailedTrials or 0) > self.maxTrials:
            more = f"{self.maxFailedTrials} is more than there are trials, maxTrials {self.maxTrials}"
            raise refusal(more, "maxFailedTrials")
        return self


class Scheduling(RunPolicy):
    """`trainingInput.scheduling`."""

    maxRestarts: Count | None = None
    maxRetries: Count | None = None
    heartbeatSeconds: Seconds | None = None
    lostAfterSeconds: Seconds | None = None
    maxWaitTime: Seconds | None = None
    maxRunningTime: Seconds | None = None
    stallTimeout: Seconds | None = None
    preparingSeconds: Seconds | None = None
    stopSeconds: Seconds | None = None
    logLimit: Size | None = None
    priority: Whole | None = None


class TrainingInput(Section):
    """`trainingInput`."""

    old_names: ClassVar[Mapping[str, str]] = {"startHosts": "wake"}
    unsupported: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("masterConfig", "workerConfig", "parameterServerConfig", "evaluatorConfig"), _ROLE_CONFIG),
        "packageUris": "fab train builds the package itself, give it --package DIR",
        "network": "hosts have a network of their own, or that of pulumi config set subnetwork; take it out",
        "serviceAccount": "each role has an account, or that of pulumi config set serviceAccount; take it out",
        "encryptionConfig": "Google encrypts disks and bucket with its own keys; take it out",
        "enableWebAccess": "fab shell HOST opens a shell on a host; take it out",
    }

    scaleTier: str | None = None
    masterType: str | None = None
    workerType: str | None = None
    parameterServerType: str | None = None
    evaluatorType: str | None = None
    workerCount: Count | None = None
    parameterServerCount: Count | None = None
    evaluatorCount: Count | None = None
    pythonModule: str | None = None
    args: list[str] | None = None
    jobDir: str | None = None
    labels: _Labels | None = None
    environment: dict[str, str] | None = None
    useChiefInTfConfig: StrictBool | None = None
    scheduling: Scheduling | None = None
    startHosts: StrictBool | None = None
    region: str | None = None
    runtime: str | None = None
    runtimeVersion: Annotated[str, BeforeValidator(_version)] | None = None
    pythonVersion: str | None = None
    hyperparameters: Hyperparameters | None = None
    notify: Notify | None = None


class JobConfig(Section):
    """A whole config.yaml."""

    jobId: str | None = None
    labels: _Labels | None = None
    notify: Notify | None = None
    trainingInput: TrainingInput | None = None
