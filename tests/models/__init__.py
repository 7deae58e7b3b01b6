"""Models written out by hand the way people write them, none of which knows this package: one file for each idea."""
