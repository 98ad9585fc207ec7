"""Sweeps: jobs that several processes share. Each job is done once, even if processes are killed."""

from sympow.sweeps.estimates import Estimates
from sympow.sweeps.executors import EXECUTORS
from sympow.sweeps.records import Records
from sympow.sweeps.runner import Finished, run_jobs
from sympow.sweeps.worker import Work

__all__ = ["EXECUTORS", "Estimates", "Finished", "Records", "Work", "run_jobs"]
