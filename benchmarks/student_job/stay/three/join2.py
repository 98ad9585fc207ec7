import csv, re, shutil, subprocess, sys
from pathlib import Path
sys.path.insert(0, "/work/main")
from benchmarks.common.measure import read, write
from benchmarks import ops
GOT, RES = Path("/work/got2"), Path("/work/main/benchmarks/results")
HEAD = "cafa0d1e8b4f"
for f in GOT.rglob("*.csv"):
    t = f.read_text(); f.write_text(t.replace(",unknown,", f",{HEAD},"))
# ops
old, new = read(RES/"ops_h200.csv"), read(GOT/"ops_gpu.csv")
key = lambda r: tuple(r[n] for n in ops.SAME)
news = {key(r) for r in new}
rows = [r for r in old if key(r) not in news] + new
cold = next(r["cold_start_s"] for r in old if r["cold_start_s"])
rows.sort(key=ops._order); write(RES/"ops_h200.csv", rows); print("ops", len(old), len(rows))
# speed
from sympow.recall import write_results
sp = RES/"context_scaling/speed.csv"
rows = read(sp) + read(GOT/"speed.csv")
rows.sort(key=lambda r: [r[n] for n in ("variant","context","mode")])
cols = dict.fromkeys(n for r in rows for n in r)
write_results(sp, [{n: r.get(n) for n in cols} for r in rows])
# decoding of students
shutil.copy(GOT/"conversion_decoding.csv", RES/"conversion/decoding.csv")
shutil.copy(GOT/"long_text_gpu.csv", RES/"long_text_gpu.csv")
# needles
def raw(p): return list(csv.DictReader(open(p)))
new = []
for f in sorted(GOT.glob("*_[hd].csv")):
    if f.name.startswith("passkeys"): continue
    new += raw(f)
old = raw(RES/"conversion/needles.csv"); fields = list(old[0])
nk = lambda r: (r["model"], r["task"], r["values"], int(r["context"]))
gone = {nk(r) for r in new}
rows = [r for r in old if nk(r) not in gone] + new
MODELS = list(dict.fromkeys(r["model"] for r in old)); TASKS = ("single","multikey","tracing")
rows.sort(key=lambda r: (MODELS.index(r["model"]), TASKS.index(r["task"]), int(r["context"]), r["values"], float(r["depth"])))
with open(RES/"conversion/needles.csv","w",newline="") as h:
    w = csv.DictWriter(h, fields, lineterminator="\n"); w.writeheader(); w.writerows(rows)
print("needles", len(old), len(rows))
new = raw(GOT/"passkeys32_d.csv"); old = raw(RES/"conversion/passkeys.csv"); fields = list(old[0])
place = next(i for i, r in enumerate(old) if (r["model"], r["context"]) == ("delta-B","32768"))
rest = [r for r in old if (r["model"], r["context"]) != ("delta-B","32768")]
with open(RES/"conversion/passkeys.csv","w",newline="") as h:
    w = csv.DictWriter(h, fields, lineterminator="\n"); w.writeheader(); w.writerows(rest[:place] + new + rest[place:])
print("passkeys", len(old), len(new), new[0].keys(), fields)
