"""benchmarks.training_ranks in one call: ranks.py --out OUT ...; writes OUT/ranks.csv.

On one GPU: the runs "one" and "halves", and the row of this pair alone. With two (REPEAT_GPUS=2 or more) all runs and
all rows, by the calls that the program describes.
"""
import os
import subprocess
import sys

import benchmarks.training_ranks as ranks

MODULE = "benchmarks.training_ranks"


def only_halves() -> int:
    real_latest, real_losses = ranks.latest_step, ranks.losses

    def latest_step(folder):  # so that the program compares what is there
        return 10**9 if folder.name == "continued" else real_latest(folder)

    def compare(out, steps):
        kept, there = ranks.losses, real_losses(out / "one")
        try:  # the pairs that are missing compare "one" with itself, and are left out
            ranks.losses = lambda run: real_losses(run) if (run / "config.json").exists() else there
            rows = real_compare(out, steps)
        finally:
            ranks.losses = kept
        return [row for row in rows if row["run"] == "halves"]

    real_compare = ranks.compare
    ranks.latest_step, ranks.compare = latest_step, compare
    return ranks.main()


def main() -> int:
    if int(os.environ.get("REPEAT_GPUS", "1")) < 2:
        return only_halves()
    one = [sys.executable, "-m", MODULE, *sys.argv[1:]]
    several = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", MODULE,
               *sys.argv[1:]]
    both = os.environ | {"CUDA_VISIBLE_DEVICES": "0,1"}
    code = subprocess.run(several, env=both).returncode
    return code or subprocess.run(one).returncode


if __name__ == "__main__":
    raise SystemExit(main())
