"""What all that serves HTTP here keeps to: errors, paths, header fields, where it may listen. No I/O."""
