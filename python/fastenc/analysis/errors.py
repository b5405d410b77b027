"""The error of data that are too few, or too much alike, for a measurement."""


class TooFewData(ValueError):
    """A measurement is not defined for these data. A report leaves its figure out and says why."""
