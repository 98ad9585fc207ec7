"""Sweeps: jobs shared out among processes that may be killed at any moment, each done once."""

from sympow.sweeps.estimates import Estimates
from sympow.sweeps.executors import EXECUTORS
from sympow.sweeps.records import Records
from sympow.sweeps.runner import Finished, run_jobs
from sympow.sweeps.worker import Work

__all__ = ["EXECUTORS", "Estimates", "Finished", "Records", "Work", "run_jobs"]
