"""How the tokens of a text see each other: a file for each kind of layer."""
