"""How results reach a person: on a terminal, in a notebook, and as text that only shows."""
