"""Silent errors of training that people reported, each a small program with a correct twin."""
