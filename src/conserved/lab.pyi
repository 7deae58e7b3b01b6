# For type checkers, which do not run `conserved.former_paths`.
