"""What the commands of the command line do, each from the values of its options."""
