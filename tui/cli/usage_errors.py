"""Replace the error messages of the command line parser with evener's own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from evener.balancer.number_format import join_words
from evener.errors import EvenerError, RequestError
from evener.printable import plain

MOST_SHOWN = 60  # maximum number of characters of the user's value in a message
_NUMBERS = {"int": "a whole number", "integer": "a whole number", "float": "a number"}
_REFUSED = re.compile(r"^'?(?P<given>.*?)'? is not (a valid|in the range|one of) ", re.DOTALL)
_EXTRA = re.compile(r"^Got unexpected extra arguments? ?\(?s?\)? ?\((?P<given>.*)\)", re.DOTALL)
_NO_COMMAND = re.compile(r"^No such command '(?P<given>.*?)'\.", re.DOTALL)


def usage_fault(error: Exception, command: str) -> EvenerError | None:
    """Convert a usage error of `command` to an EvenerError, or return None for other exceptions."""
    describe = getattr(error, "format_message", None)
    if describe is None:
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else command
    help_hint = f"See {command} --help."
    message = str(getattr(error, "message", "") or "")
    explained = _explain_missing(error, command, help_hint) or _explain_unknown(
        error, command, help_hint
    )
    explained = explained or _explain_value(error, message, help_hint)
    if explained is not None:
        return explained
    extra = _EXTRA.match(message)
    if extra is not None:
        given = plain(extra["given"], MOST_SHOWN)
        return RequestError(f"{command} has no use for {given!r}.", help_hint)
    text = str(describe()).strip()
    return RequestError(text if text.endswith((".", "?")) else f"{text}.", help_hint)


def _explain_missing(error: Exception, command: str, help_hint: str) -> RequestError | None:
    """Return an error if an argument or value is missing, or a flag was given a value.

    Returns None for any other error. `help_hint` says which `--help` to read.
    """
    kind = type(error).__name__
    parameter = getattr(error, "param", None)
    if kind == "MissingParameter" and parameter is not None:
        return RequestError(f"{command} needs {_name(parameter)}.", help_hint)
    option = getattr(error, "option_name", None)
    if kind != "BadOptionUsage" or option is None:
        return None
    if "does not take a value" in str(getattr(error, "message", "")):
        return RequestError(f"{option} takes no value.", f"Write {option} alone.")
    return RequestError(f"{option} needs a value.", help_hint)


def _explain_unknown(error: Exception, command: str, help_hint: str) -> RequestError | None:
    """If the option or command is unknown, return an error that suggests similar names.

    Returns None for any other error. `help_hint` says which `--help` to read.
    """
    if type(error).__name__ == "NoSuchOption":
        option = plain(str(getattr(error, "option_name", "")), MOST_SHOWN)
        alike = sorted(getattr(error, "possibilities", None) or ())
        remedy = f"Did you mean {_either(alike)}?" if alike else help_hint
        return RequestError(f"{command} has no option {option}.", remedy)
    message = str(getattr(error, "message", "") or "")
    unknown = _NO_COMMAND.match(message)
    if unknown is None:
        return None
    alike = re.findall(r"'([^']+)'", message[unknown.end() :])
    context = getattr(error, "ctx", None)
    commands = list(context.command.list_commands(context)) if context is not None else []
    remedy = f"Did you mean {_either(alike)}?" if alike else f"Commands: {', '.join(commands)}."
    given = plain(unknown["given"], MOST_SHOWN)
    return RequestError(f"{command} has no command {given}.", remedy)


def _explain_value(error: Exception, message: str, help_hint: str) -> RequestError | None:
    """Return an error for a value that the option's type doesn't accept.

    Returns None for any other error. `help_hint` says which `--help` to read.
    """
    parameter = getattr(error, "param", None)
    refused = _REFUSED.match(message)
    if parameter is None or refused is None:
        return None
    given = plain(refused["given"], MOST_SHOWN)
    wanted = _describe_type(parameter.type)
    remedy = f"Give {wanted}." if wanted else help_hint
    return RequestError(f"{_name(parameter)} {given} can't be used.", remedy)


def _name(parameter: Any) -> str:
    """Return the name of an option or argument as the user types it."""
    if getattr(parameter, "param_type_name", "") == "option":
        return str(parameter.opts[0])
    return str(parameter.metavar or parameter.human_readable_name).rstrip(".")


def _describe_type(kind: Any) -> str:
    """Describe the accepted values, such as "a whole number from 0 to 65535", or "" if unknown."""
    choices = getattr(kind, "choices", None)
    if choices is not None:
        return _either([str(getattr(choice, "value", choice)) for choice in choices])
    name = str(getattr(kind, "name", ""))
    number = _NUMBERS.get(name.removesuffix(" range"))
    if number is None:
        return ""
    low = getattr(kind, "min", None)
    high = getattr(kind, "max", None)
    if high is not None:
        return f"{number} from {low or 0:g} to {high:g}"
    return number if low is None else f"{number} of {low:g} or more"


def _either(words: Sequence[str]) -> str:
    """Join words with commas and "or"."""
    return join_words(words, "or")
