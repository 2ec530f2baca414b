"""The running network beside its simulation and its plan."""
