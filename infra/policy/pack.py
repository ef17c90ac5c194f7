"""The rules as policies of Pulumi's SDK."""

from __future__ import annotations

from pulumi_policy import (
    EnforcementLevel,
    Policy,
    PolicyConfigSchema,
    ReportViolation,
    ResourceValidation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)

from infra.policy.rules import DEFAULT_MAX_HOURLY_COST, RULES, Rule, hourly_cost


def policies() -> list[Policy]:
    """Return every rule as a policy, and the limit of the cost, which reads the whole stack."""
    schema = PolicyConfigSchema(properties={"maxHourlyCost": {"type": "number", "default": DEFAULT_MAX_HOURLY_COST}})
    ceiling = StackValidationPolicy(
        name="hourly-cost",
        description="The hosts together cost no more than maxHourlyCost",
        validate=_ceiling,
        enforcement_level=EnforcementLevel.MANDATORY,
        config_schema=schema,
    )
    return [*(_policy(rule) for rule in RULES), ceiling]


def _policy(rule: Rule) -> Policy:
    return ResourceValidationPolicy(
        name=rule.name,
        description=rule.description,
        validate=_validation(rule),
        enforcement_level=EnforcementLevel.MANDATORY,
        config_schema=PolicyConfigSchema(properties={key: dict(value) for key, value in rule.schema.items()})
        if rule.schema
        else None,
    )


def _validation(rule: Rule) -> ResourceValidation:
    def validate(args: ResourceValidationArgs, report: ReportViolation) -> None:
        for wrong in rule.check(args.resource_type, args.props, args.get_config()):
            report(f"{args.name}: {wrong}", None)

    return validate


def _ceiling(args: StackValidationArgs, report: ReportViolation) -> None:
    for wrong in hourly_cost([(item.resource_type, item.props) for item in args.resources], args.get_config()):
        report(wrong, None)
