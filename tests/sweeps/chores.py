"""Jobs that test the sweep runner, in a module that worker processes can import."""

import gc
import os
import time


class Chores:
    """Does what a job says: "fail", "die", "die later", "sleep", or anything else, which is given back."""

    def prepare(self, worker):
        return self.do

    def do(self, job: str) -> dict:
        if job == "fail":
            raise RuntimeError("out of luck")
        if job == "die":
            os._exit(3)
        if job == "die later":  # as the worker frees memory, when the result has been saved
            gc.disable()
            gc.callbacks.append(lambda phase, info: os._exit(3))
        if job == "sleep":
            time.sleep(600)
        return {"done": job, "process": os.getpid()}


def guess(job: str) -> float:
    """Seconds of a job."""
    return 1e9 if job == "long" else 1e-3


def kind(job: str) -> str:
    """Jobs are of kinds of their own, and in groups by their first letter."""
    return job[0]
