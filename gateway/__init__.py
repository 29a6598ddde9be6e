"""Speaks OpenAI to the world. Knows nothing about workers or models' insides."""
