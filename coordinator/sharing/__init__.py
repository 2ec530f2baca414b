"""Who steps next in an engine process that several models share, and what each of them may hold of its KV memory."""
