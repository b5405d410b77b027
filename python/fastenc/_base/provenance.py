"""Where a result comes from: the command, the versions of the packages, and the date."""

import platform
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version

import fastenc

_command: ContextVar[str | None] = ContextVar("command", default=None)


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[None]:
    """Keep the arguments of ``fastenc`` as the command of what is written inside."""
    before = _command.set(shlex.join(["fastenc", *arguments]))
    try:
        yield
    finally:
        _command.reset(before)


def command() -> str | None:
    """The command line that runs; None if fastenc is called from Python."""
    return _command.get()


def versions(*packages: str) -> dict[str, str]:
    """{package: version} of fastenc, Python and those of these packages that are installed."""
    numbers = {"fastenc": fastenc.__version__, "Python": platform.python_version()}
    for package in packages:
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            continue
    return numbers


def today() -> str:
    """The date in UTC, such as 2025-01-31."""
    return datetime.now(timezone.utc).date().isoformat()
