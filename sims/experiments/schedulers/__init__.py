"""Schedulers of papers other than ThunderServe, each under the evaluation of its own paper."""
