"""One step of optimization: the protocol, its eager and its compiled engine."""
