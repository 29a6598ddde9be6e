"""The wire contract in Python, generated from proto/candor/v1 and committed."""
