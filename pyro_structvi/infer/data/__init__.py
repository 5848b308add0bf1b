"""From the data as they are given to the arguments of each step."""
