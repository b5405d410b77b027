"""The command line: ``fastenc COMMAND``; ``fastenc --help`` lists the commands."""

import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# What the operating system says of a path, in words.
PATH_ERRORS = {
    FileNotFoundError: "there is no {}: check the path",
    FileExistsError: "{} is a file where a folder has to be: give another path",
    NotADirectoryError: "{} has a file where a folder has to be: give another path",
    IsADirectoryError: "{} is a folder where a file has to be: give another path",
    PermissionError: "{} cannot be opened or written: check its permissions",
}
READ_ONLY = "{} is on a file system that cannot be written: give another path"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. An error that the user can correct is one line on stderr, with the exit code 2.

    Args:
        arguments: without the program's name; None: those of this process.
    """
    from fastenc._base.provenance import running
    from fastenc.cli.commands import run

    _open_streams()
    warnings.showwarning = _show_warning
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with running(given):
            run(given)
        sys.stdout.flush()
    except BrokenPipeError as error:  # nothing reads stdout any more, as after `| head`
        with open(os.devnull, "w") as nowhere:  # Python flushes once more when it exits
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise SystemExit(128 + 13) from error  # as of a program that the signal SIGPIPE ends
    except (ValueError, ImportError, OSError, FloatingPointError) as error:
        print("fastenc:", " ".join(_message(error).split()), file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:  # if training had begun, a checkpoint has been written
        print("fastenc:", error if error.args else "interrupted", file=sys.stderr)
        raise SystemExit(128 + getattr(error, "signal_number", signal.SIGINT)) from error


def _open_streams() -> None:
    """Replace standard streams that are closed, as after ``>&-``, by an empty one. They are None in Python.

    stdout is UTF-8, as the files are, whatever the locale. A file's name that is not UTF-8 is printed as it is.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 - the command uses it
            setattr(sys, name, stream)
    # In a notebook, or under redirect_stdout, it is of another class.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        message = READ_ONLY if error.errno == errno.EROFS else PATH_ERRORS.get(type(error))
        if message is not None:
            return message.format(error.filename)
    return str(error)


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """Print fastenc's warnings as one line, because they are about the user's data, and others as Python does."""
    if Path(filename).is_relative_to(PACKAGE):
        text = f"fastenc: warning: {message}\n"
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
    sys.stderr.write(text)
