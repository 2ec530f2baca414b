"""The simulator: runs the coordinator's own code in virtual time."""

from .events import Event, EventOrderError, EventQueue, QueueStatistics, RunawayError, Scheduled

__all__ = ["Event", "EventOrderError", "EventQueue", "QueueStatistics", "RunawayError", "Scheduled"]
