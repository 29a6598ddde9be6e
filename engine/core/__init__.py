"""What decides: which tokens are computed, which one comes next, when a choice ends.

Plain Python and numpy. Nothing in here knows protobuf, gRPC, asyncio or a model framework; clocks and seeds
are handed in.
"""
