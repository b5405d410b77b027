"""What several test files share; a file for one op has the op's stem."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # the repository
