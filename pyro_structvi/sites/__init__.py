"""The sites of a model, and guides that give each a posterior."""
