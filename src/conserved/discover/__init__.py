"""From a function to the number of its laws, and the laws themselves, with no knowledge of architectures."""
