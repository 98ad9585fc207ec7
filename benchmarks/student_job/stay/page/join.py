"""Joins the rows of the stay into the files of the page."""
import csv, json, subprocess, sys
from pathlib import Path
sys.path.insert(0, "/work/main")
GOT, OUT = Path("/work/got/s"), Path("/work/main/benchmarks/results/conversion")
COMMIT = "7e05a119d2b4"
COMMIT = subprocess.run(["git","-C","/work/main","rev-parse","--short=12","7e05a119"],capture_output=True,text=True).stdout.strip()
NAMES = {"d": "delta", "h": "hybrid_delta", "n": "deltanet", "w": "windows", "p": "all_delta"}
def rows(path): return list(csv.DictReader(path.open()))
fields = list(rows(GOT/"d/bench-d-C.csv")[0])
def stages(folder, phase, before=None):
    """stage rows at each evaluation of a phase, with tokens, steps and seconds of the run before it"""
    out=[]
    for line in (GOT/folder/f"{phase}-metrics.jsonl").read_text().splitlines():
        row=json.loads(line)
        if "gap" in row: out.append(row)
    return out
def end(folder, phase):
    return json.loads((GOT/folder/f"{phase}-metrics.jsonl").read_text().splitlines()[-1])
passkeys, needles = [], []
for s, name in NAMES.items():
    sample = rows(GOT/s/("bench-%s-C.csv"%s if s!="p" else "curve-p-B.csv"))
    about = {k: sample[0][k] for k in ("layers","processor","code","torch")} | {"commit": COMMIT}
    def write(letter, found):
        path = OUT/f"smollm2-{name}-{letter}.csv"
        with path.open("w", newline="") as f:
            w=csv.DictWriter(f, fields, lineterminator="\n"); w.writeheader()
            for r in found: w.writerow({"run": f"{name}-{letter}"} | {k:v for k,v in (about|r).items() if k in fields and k!="run"} | {"run": f"{name}-{letter}", "commit": COMMIT})
        print(path.name, len(found))
    first = end(s,"A0")
    a = [{"kind":"stage","step":r["step"],"stage":1,"tokens":r["tokens"],"seconds":r["seconds"],"held_out_loss":r["held_out_loss"],"teacher_loss":r["teacher_loss"],"gap":r["gap"]} for r in stages(s,"A0") if r["stage"]==1]
    a += [{"kind":"stage","step":first["step"]+r["step"],"stage":2,"tokens":first["tokens"]+r["tokens"],"seconds":first["seconds"]+r["seconds"],"held_out_loss":r["held_out_loss"],"teacher_loss":r["teacher_loss"],"gap":r["gap"]} for r in stages(s,"B")]
    file = f"loss-{s}-B.csv" if s!="p" else "curve-p-B.csv"
    a += [r for r in rows(GOT/s/file) if r["kind"]!="stage"]
    write("A", a)
    later = {"p": ["C","E","F"]}.get(s,["C"])
    for letter, phase in zip("BCD", later):
        file = f"bench-{s}-{phase}.csv" if s!="p" else f"curve-p-{phase}.csv"
        found = rows(GOT/s/file)
        for r in found: r.pop("commit")
        write(letter, found)
        e=end(s,phase); print(name, letter, "end", e["step"], e["tokens"], round(e["seconds"]))
    for phase, letter in zip(["B","C","E","F"] if s=="p" else ["C"], "ABCD" if s=="p" else "B"):
        for f in sorted((GOT/s).glob(f"passkeys-*-{s}-{phase}.csv"), key=lambda f:int(f.name.split("-")[1])):
            passkeys += [{**r,"model":f"{name}-{letter}"} for r in rows(f)]
        for kind in ("single-4096","digits-8192","words-8192"):
            f=GOT/s/f"{kind}-{s}-{phase}.csv"
            if f.exists(): needles += [{**r,"model":f"{name}-{letter}"} for r in rows(f)]
    print(name, "A0", first["tokens"], round(first["seconds"]), "B", end(s,"B")["tokens"], round(end(s,"B")["seconds"]), end(s,"B")["step"])
ORDER = ("hybrid_delta","delta","deltanet","windows","all_delta")
GONE = ("hybrid","hybrid_delta2",*ORDER)
for file, new in (("passkeys.csv",passkeys),("needles.csv",needles)):
    old=rows(OUT/file); f=list(old[0])
    keep=[r for r in old if r["model"].rpartition("-")[0] not in GONE]
    with (OUT/file).open("w",newline="") as h:
        w=csv.DictWriter(h,f,lineterminator="\n"); w.writeheader(); w.writerows(sorted(new, key=lambda r: ORDER.index(r["model"].rpartition("-")[0]))+keep)
    print(file,len(old),len(keep),len(new))
