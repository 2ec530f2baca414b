"""The commands of the command line: what each takes. What they do is in `sdk/actions`, and imported when they run."""
