"""The command line: ``fastenc pretrain | recipes | finetune | predict | embed | profile | bench | info``."""

import sys


def main() -> None:
    """Run the command line; an error the user can mend is one line on stderr and exit code 2."""
    try:
        from fastenc._extras import require

        require("typer", extra="train")
        from fastenc.cli.app import app

        app()
    except (ValueError, ImportError, OSError, FloatingPointError) as error:
        print("fastenc:", " ".join(str(error).split()), file=sys.stderr)
        raise SystemExit(2) from error
