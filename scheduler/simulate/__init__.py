"""The digital twin: the very core that serves, under a virtual clock, over modelled cards and traffic.

`Twin` runs one trace; `traces` makes them or reads them from a file; `report` says what came out.
"""

from scheduler.simulate.cards import CardModel
from scheduler.simulate.traces import TraceRequest
from scheduler.simulate.twin import Outcome, Result, Twin

__all__ = ["CardModel", "Outcome", "Result", "TraceRequest", "Twin"]
