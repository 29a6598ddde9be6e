"""Side-by-side measurements. Every figure is printed with its peer from the same call; none is a test."""
