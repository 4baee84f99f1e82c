"""A plugin of onnxplace: several hosts, the links between them, and bundles that run there on ranks of MPI."""
