"""Errors that end a command in one line and a known exit code.

A message says what is wrong and what is allowed, on one line; the command line prints it and returns `exit_code`.
Anything else that escapes is a fault of the program and ends in exit code 4 too (1 is kept for verdicts).
"""

from typing import ClassVar


class SparkbenchError(Exception):
    """Base of the errors a user is meant to read."""

    exit_code: ClassVar[int] = 4


class UsageError(SparkbenchError):
    """A bad value, name, file or combination, known before work starts."""

    exit_code = 2


class NotComparable(SparkbenchError):
    """Results that must not be compared with each other."""

    exit_code = 3


class RunError(SparkbenchError):
    """Work that failed while running: model, memory, disk, network."""

    exit_code = 4


def first_line(error: BaseException) -> str:
    """What an error says, on one line: the first line of its text, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
