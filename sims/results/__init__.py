"""What comes out of a simulation: figures, tables, pictures."""
