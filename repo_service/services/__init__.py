"""What a repository does: each service joins the store's bytes and the index's rows, in the order of I4."""
