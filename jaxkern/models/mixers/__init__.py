"""How the tokens of a text see each other: one file a kind of layer, each with its state."""
