"""Runs commands of fastenc in this process."""

import sys

import pytest
from typer.testing import CliRunner

from fastenc.cli import main
from fastenc.cli.app import app


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def failure(capsys, *arguments):
    """The one line that an error leaves on stderr."""
    sys.argv = ["fastenc", *(str(a) for a in arguments)]
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("fastenc: ") and text.count("\n") == 1
    return text
