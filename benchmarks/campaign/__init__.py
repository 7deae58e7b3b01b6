"""A search for wrong gradients in released software: targets, the search, and confirmation without this library."""
