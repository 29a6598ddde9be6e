"""Turns prompts into deltas on one card. Knows nothing about HTTP, queues or other workers."""
