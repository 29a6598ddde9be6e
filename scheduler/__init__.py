"""Decides who waits and who runs, and where. Knows nothing about text or HTTP."""
