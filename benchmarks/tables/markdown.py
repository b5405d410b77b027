"""Tables and sections in Markdown."""

from collections.abc import Collection, Iterable

from benchmarks.tables.results import machine_line


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: str, rows: Iterable[str], left: Collection[int] = (0,)) -> str:
    """A table of lines by :func:`row`. The columns ``left`` are aligned to the left, the others to the right."""
    columns = range(head.count("|") - 1)
    alignment = "".join("---|" if column in left else "---:|" for column in columns)
    return "\n".join([head, f"|{alignment}", *rows])


def section(data: dict, title: str, command: str, text: str, body: str) -> str:
    """A section of a page with the command that measures ``data``; its text ends with the machine."""
    return plain_section(title, command, f"{text} {machine_line(data['machine'])}".lstrip(), body)


def plain_section(title: str, command: str, text: str, body: str) -> str:
    """A section that belongs to no machine."""
    return f"### {title}\n\n`{command}`\n\n{text}\n\n{body}\n"
