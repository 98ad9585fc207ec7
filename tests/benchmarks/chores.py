"""Jobs that test the launcher, in a module that worker processes can import."""

import os
import time


class Chores:
    """Does what a job says: "fail", "die", "sleep", or anything else, which is given back."""

    def prepare(self, worker):
        return self.do

    def do(self, job: str) -> dict:
        if job == "fail":
            raise RuntimeError("out of luck")
        if job == "die":
            os._exit(3)
        if job == "sleep":
            time.sleep(600)
        return {"done": job, "process": os.getpid()}
