"""A fit between its steps, and how it is kept and found again."""
