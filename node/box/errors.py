"""Why a node cannot run."""


class NodeError(Exception):
    """The node cannot run. The text is one line for the user."""


class NodeUsageError(NodeError):
    """What the owner has asked for cannot be: the text names the option and the fix."""
