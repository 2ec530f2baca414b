"""Other groups of boxes than those that run: what they would gain, in which steps they load, and how far that is."""
