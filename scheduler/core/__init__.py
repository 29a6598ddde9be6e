"""Decides who waits, who runs and where: a state machine over (event, now), without I/O, clock or tasks.

`Scheduler` is the machine; everything else is what it is made of and what it says.
"""

from scheduler.core.machine import Scheduler
from scheduler.core.order import ORDERS
from scheduler.core.placement import POLICIES
from scheduler.core.pool import Worker
from scheduler.core.record import Record

__all__ = ["ORDERS", "POLICIES", "Record", "Scheduler", "Worker"]
