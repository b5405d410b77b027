"""The log of a run: a file with one JSON object on each line."""

import json
from pathlib import Path
from typing import Any

from fastenc._base.files import write_text_atomically


class Log:
    """Appends lines to ``log.jsonl``.

    Args:
        step: the step from which the run is resumed. Lines of later steps, which an interrupted run wrote, are dropped.
    """

    def __init__(self, path: Path, step: int = 0):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(path) if line["step"] <= step] if step else []
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_text_atomically(path, text)

    def write(self, **values: object) -> None:
        """Append a line."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log. If a kill left the last line incomplete, it is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines
