"""The options of the command line's commands, and how a command is declared."""
