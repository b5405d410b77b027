"""Runs commands of fastenc in this process."""

import io
from contextlib import redirect_stderr, redirect_stdout

import pytest

from fastenc.cli import main


def run(*arguments):
    """What a command prints."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            assert not exit_.code, out.getvalue()
    return out.getvalue()


def failure(capsys, *arguments):
    """The one line of an error on stderr, behind what was said before it."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    assert exit_.value.code == 2
    text = capsys.readouterr().err
    assert text.count("fastenc: ") == text.rsplit("\n", 2)[-2].startswith("fastenc: ") == 1, text
    return text
