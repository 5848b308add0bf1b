"""Linear maps, and the calls of torch that are read as maps."""
