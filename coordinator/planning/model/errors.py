"""What keeps a problem from having a plan. Light to import: whoever explains errors needs no
planner."""


class NoPlan(ValueError):
    """A problem without a solution; one line that says what is missing."""


class UnservedError(ValueError):
    """No replica of a service can serve its requests; one line."""
