"""What goes wrong in a benchmark without ending it."""


class FailedError(Exception):
    """A measurement, or the server it needs, that did not come about; the message says why."""
