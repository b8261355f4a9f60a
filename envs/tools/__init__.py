"""Tools: what the model can do inside its sandbox."""
