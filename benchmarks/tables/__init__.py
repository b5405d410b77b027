"""The tables of the README and of docs/, from the committed results: ``python -m benchmarks.tables``."""
