"""The contract in Python and the manners for speaking it: errors, gRPC, settings, telemetry.

Knows nothing about tokens, HTTP dialects or queues.
"""

from candor._version import VERSION as __version__

__all__ = ["__version__"]
