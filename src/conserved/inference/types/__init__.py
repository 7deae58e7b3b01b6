"""Types of tensors, and the equations between them.

`tensor_type.py` says how the entries of a tensor may move. `engine.py` has the statements that rules make about types,
`system.py` holds the equations that follow, and `echelon.py` solves them exactly over the rationals.
"""
