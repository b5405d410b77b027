"""Errors of measurements that a report leaves out; it says why."""


class NotMeasured(ValueError):
    """A measurement cannot be made."""


class TooFewData(NotMeasured):
    """The data are too few, or too much alike, for the measurement."""


class UnknownAttention(NotMeasured):
    """The model's attention has terms that the measurement does not compute."""
