"""Experiments of other papers than ThunderServe's, in those papers' own settings."""
