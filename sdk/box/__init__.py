"""What commands do with the node of this box while it runs: drain it, let it leave, read its log; and how it is set."""
