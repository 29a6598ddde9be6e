"""Text to token ids and back: a library with a service around it."""
