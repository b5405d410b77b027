"""``python -m fastenc`` is the command ``fastenc``."""

from fastenc.cli import main

main()
