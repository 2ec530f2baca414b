"""The box: its hardware, its folder, what it must have, and how much of a model it takes."""
