"""The command line of `fab`: Fabric parses it; positional arguments, help and suggestions are added here.

A command is a task of Fabric. Fabric's own flags that this project has no use for are not listed; a flag has a short form
only if it is the same in every command.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import fabric
from fabric.main import Fab
from invoke.exceptions import Exit, ParseError
from invoke.parser import Argument, ParserContext
from invoke.parser.context import to_flag

from infra.templates import ROOT
from ops.cli.checkout import is_checkout
from ops.errors import WRONG_CALL, one_line

DASHES = "--"
HELP = ("-h", "--help")
_HELP_WORD = "help"
# Short forms of flags, which mean the same in every command.
_SHORT = {"job": "j", "follow": "f", "lines": "n"}
# Useful flags before the command: name and short form.
_CORE = {"help": "h", "list": "l", "version": "V", "debug": None, "stack": None, "project": None}

# Flags of the previous version, of all commands or of one, and their present names.
_OLD_FLAGS = {"--wake": "--start-hosts", "shell --replica": "--host"}
# Commands of the previous version, and their replacements.
_REPLACED = {
    "render": "fab train --dry-run",
    "try": "python examples/draw/draw.py MODEL",
    "make-request": "python -m trainer.request",
}
# Flags of fab train that another command lacks, and the remedy.
_TRAIN_FLAGS = {
    f"plan {flag}": "it runs a module that prints Train lines, as the library does: --package FOLDER --module FOLDER.NAME"
    for flag in ("--script", "--command")
}
# Flags of gcloud ai-platform without a counterpart of a similar name, and the remedy.
_GCLOUD_FLAGS = {
    "--async": "fab train and fab predict --batch have --no-follow",
    "--stream-logs": "fab train follows the logs by default",
    "--worker-count": "--replicas worker=N takes N workers",
    "--parameter-server-count": "--replicas ps=N takes N parameter servers",
    "--packages": "requirements.txt or pyproject.toml of the package lists what it needs",
    "--region": "not needed, as the stack defines where hosts are",
    "--staging-bucket": "not needed, as the stack has a bucket",
    "--python-version": "not needed, as the hosts have one version of Python",
    "--use-chief-in-tf-config": "useChiefInTfConfig of config.yaml sets it",
    "--text-instances": "--json-instances takes a file with a JSON string on each line",
    "--json-request": "--json-instances takes a file with an instance on each line",
    "--data-format": "not needed, as the files show it",
    "--batch-size": "not needed, as instances are batched by themselves",
    "--max-worker-count": "--replicas N takes N hosts",
    "--model-dir": "fab deploy --origin DIR makes a version of it first",
    **{
        f"--{role}-{what}": remedy
        for role in ("master", "worker", "parameter-server")
        for what, remedy in {
            "machine-type": "pulumi config set masterType, workerType or parameterServerType sets it",
            "accelerator": "pulumi config set acceleratorType gives hosts GPUs",
            "image-uri": "--runtime gives a job its own packages, and --command runs any program",
        }.items()
    },
}

# The modules of commands, each with its topic.
TOPICS = {
    "jobs": "Jobs",
    "results": "Results of jobs",
    "models": "Served models",
    "inputs": "Inputs of jobs",
    "cluster": "The cluster",
}


class CommandTask(fabric.Task):  # type: ignore[misc]  # Fabric has no types
    """A command of `fab`.

    `positionals` are the flags whose values may be given without the flag, in this order; a flag that may be repeated is listed
    as often as it may be given. `rest` names what may stand behind `--`.
    """

    help: dict[str, str]

    def __init__(self, *args: Any, positionals: Sequence[str] = (), rest: str = "", **kwargs: Any) -> None:
        super().__init__(*args, positional=[], auto_shortflags=False, **kwargs)
        self.positionals, self.rest = tuple(positionals), rest

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:
        """Return Invoke's arguments, and keep their help texts, which Invoke drops after the first call."""
        texts: dict[str, str] = dict(self.help)
        try:
            return list(super().get_arguments(ignore_unknown_help))
        finally:
            self.help = texts

    def arg_opts(self, name: str, default: Any, taken_names: set[str]) -> dict[str, Any]:
        """Return invoke's options of a flag, with our own short form."""
        options: dict[str, Any] = super().arg_opts(name, default, taken_names)
        options["names"] = (*options["names"], *_SHORT.get(name, ()))
        return options


def after_dashes(argv: Sequence[str]) -> list[str]:
    """Return the arguments behind a lone `--`, each as the shell gave it."""
    return list(argv[argv.index(DASHES) + 1 :]) if DASHES in argv else []


def help_command(tokens: Sequence[str]) -> str | None:
    """Return the command whose help a flag or the word help requests, empty for `fab` itself; None if nothing does."""
    own_words = tokens[: tokens.index(DASHES)] if DASHES in tokens else tokens
    bare = [
        word for last, word in zip(("", *own_words), own_words, strict=False) if not word.startswith("-") and last[:1] != "-"
    ]
    if not any(word in HELP for word in own_words) and _HELP_WORD not in bare:
        return None
    return next((word for word in own_words if not word.startswith("-") and word != _HELP_WORD), "")


def protect_args(tokens: Sequence[str], flag: str = "--args") -> list[str]:
    """Keep invoke from reading the value of `--args` as a flag of the command: `--args "--json"`.

    A leading space does that. shlex, which splits the value later, ignores it.
    """
    protected: list[str] = []
    for token in tokens:
        if token.startswith(f"{flag}="):
            protected += [flag, " " + token.removeprefix(f"{flag}=")]
        elif protected and protected[-1] == flag:
            protected.append(" " + token)
        else:
            protected.append(token)
    return protected


def rename_flags(tokens: Sequence[str]) -> list[str]:
    """Return the command line with old flags by their present names, and print a line for each."""
    renamed: list[str] = []
    for token in tokens:
        flag, *value = token.split("=", 1)
        if new := _OLD_FLAGS.get(flag) or _OLD_FLAGS.get(f"{tokens[0]} {flag}"):
            sys.stderr.write(f"{flag} is called {new} now\n")
        renamed.append("=".join([new or flag, *value]))
    return renamed


def expand_positionals(tokens: Sequence[str], names: Mapping[str, Sequence[str]], valued: Mapping[str, set[str]]) -> list[str]:
    """Return the command line with positional arguments as flags, `logs worker` as `logs --replica=worker`.

    `names` are the flags that may be positional, by command; `valued` those of a command that have a value. ValueError for a
    second command.
    """
    result: list[str] = []
    task, remaining, value_follows = "", list[str](), False
    for token in tokens:
        if value_follows:
            value_follows = False
        elif token.startswith("-"):
            last = token if token.startswith("--") else f"-{token[-1]}"  # -n in `-fn 20`
            value_follows = last in valued.get(task, ())
        elif remaining:
            result.append(f"--{remaining.pop(0)}={token}")
            continue
        elif token in names and task:
            raise ValueError(f"one command at a time: fab {task}, and then fab {token}")
        elif token in names:
            task, remaining = token, list(names[token])
        result.append(token)
    return result


def flags_with_values(context: ParserContext) -> set[str]:
    """Return the flags of a command that take a value, long and short."""
    return {to_flag(name) for arg in context.args.values() if arg.takes_value for name in arg.names}


def reword(message: str, tasks: Sequence[str], flags: Sequence[str] = (), task: str = "") -> str:
    """Reword invoke's message about a wrong command line, with the remedy."""
    from infra.scale_tiers import suggest

    if error := re.search(r"No idea what '(.*)' is!", message):
        word = error[1]
        if word.startswith("-"):
            return _unknown_flag(word, flags, task)
        if task:
            return f"fab {task} takes no further argument {word!r}: see fab {task} --help"
        if word in _REPLACED:
            return f"fab {word} was replaced by: {_REPLACED[word]}"
        return f"there is no command {word!r}{suggest(word, tasks)}; valid are {', '.join(tasks)}"
    if error := re.search(r"Flag (?:<Argument: )?'?(\S+?)'?[ >(].*needed value", message):
        return f"--{error[1].lstrip('-').replace('_', '-')} needs a value"
    return " ".join(message.split())


def _unknown_flag(flag: str, flags: Sequence[str], task: str) -> str:
    from infra.scale_tiers import suggest

    if not task:
        return f"there is no flag {flag} before the command; fab --help lists the valid ones"
    if remedy := _TRAIN_FLAGS.get(f"{task} {flag}"):
        return f"fab {task} has no flag {flag}: {remedy}"
    remedy = f": {_GCLOUD_FLAGS[flag]}" if flag in _GCLOUD_FLAGS else suggest(flag, flags)
    problem = f"fab {task} has no flag {flag}{remedy}"
    if "--args" in flags and flag.startswith("--"):
        return f"{problem}; an argument of the trainer goes behind {DASHES}, as in: fab {task} … {DASHES} {flag} …"
    return f"{problem}; fab {task} --help lists the valid ones"


class CommandLine(Fab):  # type: ignore[misc]  # Fabric has no types
    """Fabric's command line for our commands alone, which never reads ~/.ssh/config."""

    def core_args(self) -> list[Argument]:
        """Return Fabric's flags, the unused ones without a short form, and those of stack and project."""
        args: list[Argument] = super().core_args()
        args += [
            Argument(
                names=("stack",), help="stack to work on (default: PULUMI_STACK, else Pulumi's selected one, else the only one)"
            ),
            Argument(names=("project",), help="checkout of scaletier to work in (default: the one that this program is from)"),
        ]
        for arg in args:
            name = next(name for name in arg.names if len(name) > 1)
            arg.names = (name, *(_CORE.get(name) or ()))
        return args

    def parse_core(self, argv: list[str] | None) -> None:
        """Parse like Fabric, but with no command behind `--` and without the user's SSH configuration."""
        try:
            super().parse_core(argv)
        except ParseError as error:
            raise Exit(f"error: {reword(str(error), ())}", WRONG_CALL) from None
        self.core.unparsed[:] = rename_flags(protect_args(self.core.unparsed))
        if not self.args.complete.value:
            self.core.remainder = ""  # Fabric would run what follows -- as a command of its own
        self.config.load_ssh_configs = False

    def load_collection(self) -> None:
        """Load our commands, from any working directory."""
        self.args["search-root"].set_value(str(ROOT))
        super().load_collection()

    def parse_tasks(self) -> None:
        """Handle help and positional arguments, parse the command, and apply --stack and --project."""
        contexts = self.collection.to_contexts()
        positionals = {context.name: self.collection[context.name].positionals for context in contexts}
        everywhere = flags_with_values(self.initial_context)
        valued = {context.name: flags_with_values(context) | everywhere for context in contexts}
        help_task = help_command(self.core.unparsed)
        if help_task is not None:
            self.core.unparsed[:] = []
            self.args["help"].set_value(help_task)
        with self._one_line_errors():
            self.core.unparsed[:] = expand_positionals(self.core.unparsed, positionals, valued)
            super().parse_tasks()
        project = self.args["project"].value
        if project and not is_checkout(Path(project)):
            raise Exit(f"error: {project} is no checkout of scaletier: it does not have scaletier's Pulumi.yaml", WRONG_CALL)
        for flag, variable in (("stack", "PULUMI_STACK"), ("project", "SCALETIER_PROJECT")):
            if value := self.args[flag].value:
                os.environ[variable] = value

    def parse_cleanup(self) -> None:
        with self._one_line_errors():
            super().parse_cleanup()

    @contextlib.contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        """Turn any error of the command line into one line, and exit code 2."""
        try:
            yield
        except ParseError as error:
            context = error.context
            task = context.name or "" if context else ""
            flags = [*context.flags, *context.inverse_flags] if task else ()
            raise Exit(f"error: {reword(str(error), sorted(self.collection.task_names), flags, task)}", WRONG_CALL) from None
        except ValueError as error:
            raise Exit(f"error: {one_line(error)}", WRONG_CALL) from None

    def print_version(self) -> None:
        _print(f"scaletier {version('scaletier')} (Fabric {fabric.__version__})")

    def print_help(self) -> None:
        """Print the usage of `fab`."""
        _print(f"Usage: {self.binary} [--stack NAME] COMMAND [ARGUMENTS] [--flags] [{DASHES} …]\n")
        self.load_collection()
        self.list_flat()
        _print(f"{self.leading_indent}{self.binary} COMMAND --help shows the rest. Before or after a command:\n")
        self.print_columns([_help_row(arg) for arg in self.core_args() + self.task_args() if arg.name in _CORE])

    def list_flat(self) -> None:
        """List the commands by topic, the topics in the order in which users need them."""
        for module, title in TOPICS.items():
            names = sorted(name for name in self.collection.task_names if _module(self.collection[name]) == module)
            if names:
                _print(f"{title}:\n")
                self.print_columns([(name, _first_line(self.collection[name])) for name in names])

    def print_task_help(self, name: str) -> None:
        """Print a command's usage, description, flags, and examples."""
        task = self.collection[name]
        context, flags = self.parser.contexts[name], task.positionals
        names = "".join(f" [{each.upper()}{' …' * (flags.count(each) > 1)}]" for each in dict.fromkeys(flags))
        rest = f" [{DASHES} {task.rest}]" if task.rest else ""
        _print(f"Usage: {self.binary} {name}{names} [--flags]{rest}\n")
        for paragraph in _paragraphs(task):
            if not _is_example(paragraph):
                _print(f"{textwrap.indent(paragraph, self.leading_indent)}\n")
        for arg in context.args.values():
            if arg.kind is list:
                arg.kind = str  # else Invoke shows no value for a flag that may be repeated
        self.print_columns(context.help_tuples())
        _print("Examples:\n")
        for example in examples(task):
            _print(f"{self.leading_indent}{example}")

    def no_tasks_given(self) -> NoReturn:
        """List the commands, as Fabric would print its own help."""
        self.list_tasks()
        raise Exit


def _print(line: str = "") -> None:
    sys.stdout.write(f"{line}\n")


def examples(task: CommandTask) -> list[str]:
    """Return the examples in a command's documentation, which are paragraphs of their own."""
    return [line for paragraph in _paragraphs(task) if _is_example(paragraph) for line in paragraph.splitlines()]


def _is_example(paragraph: str) -> bool:
    return paragraph.startswith("fab ")


def _paragraphs(task: CommandTask) -> list[str]:
    return (inspect.getdoc(task) or "").split("\n\n")


def _module(task: CommandTask) -> str:
    return str(task.body.__module__).rpartition(".")[2]


def _first_line(task: CommandTask) -> str:
    return (inspect.getdoc(task) or "").partition("\n")[0]


def _help_row(arg: Argument) -> tuple[str, str]:
    short = f"-{_CORE[arg.name]}, " if _CORE[arg.name] else ""
    value = "=NAME" if arg.takes_value else ""
    return f"{short}--{arg.name}{value}", arg.help or ""


def main() -> None:
    """Run `fab`."""
    CommandLine(name="scaletier", executor_class=fabric.Executor, config_class=fabric.Config).run()
