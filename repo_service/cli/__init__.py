"""The command ``kvgraft``: arguments in, one call of the library, text or JSON out. No command holds logic of its own."""
