"""The one error of this package."""


class ModelError(Exception):
    """The model cannot be served. The text is one line that says what is wrong and what to do."""
