"""Ways into other people's training loops."""
