"""What is wrong with a model, or with what it is asked."""


class ModelError(Exception):
    """The model cannot be served. The text is one line that says what is wrong and what to do."""


class PromptError(Exception):
    """The prompt cannot be served. The text is one line that names the field and the fix."""
