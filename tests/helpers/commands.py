"""Runs commands of fastenc in this process."""

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest

from fastenc.cli import main


def run(*arguments):
    """Run a command; returns what it prints."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            assert not exit_.code, out.getvalue()
    return out.getvalue()


def failure(capsys, *arguments):
    """Run a command that fails; returns its stderr, whose last line alone is the error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    assert exit_.value.code == 2
    text = capsys.readouterr().err
    assert text.count("fastenc: ") == text.rsplit("\n", 2)[-2].startswith("fastenc: ") == 1, text
    return text
