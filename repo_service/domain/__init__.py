"""Identity, pure and free of I/O: fingerprints, keys, layouts, manifests and the error tree."""
