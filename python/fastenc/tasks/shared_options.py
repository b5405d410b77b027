"""Options that several tasks and commands have."""

QUOTING = (
    "What double quotes mean in a .tsv file. csv: values may be in quotes, as pandas writes them. none: they are "
    "ordinary characters. Default: none, but a value that is clearly quoted is an error."
)
TOKENS_AT_ONCE = (
    "Largest number of tokens whose activations are kept. A larger micro-batch is computed in groups, twice, with the "
    "same gradient (gradient caching). Default: all at once."
)


def check_tokens_at_once(tokens_at_once: int | None) -> None:
    """Raises: ValueError for a number of tokens below 1."""
    if tokens_at_once is not None and tokens_at_once < 1:
        raise ValueError(f"tokens_at_once must be at least 1, got {tokens_at_once}: give more")
