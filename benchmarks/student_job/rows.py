import csv, json
from pathlib import Path
from sympow.recall import write_results
R=Path("/work/main/benchmarks/results/conversion"); O=Path("/work/gpuout")
def rd(p): return list(csv.DictReader(open(p)))
def wr(p, rows):
    keys=list(dict.fromkeys(k for r in rows for k in r))
    with open(p,"w",newline="") as f:
        w=csv.DictWriter(f,keys,lineterminator="\n"); w.writeheader(); w.writerows(rows)
# the earlier student
for ph in "AB":
    old=R/f"smollm2-delta-{ph}.csv"; t=old.read_text(); (R/f"smollm2-delta512-{ph}.csv").write_text(t.replace(f"delta-{ph},",f"delta512-{ph},")); 
pk=R/"passkeys.csv"; pk.write_text(pk.read_text().replace("\ndelta-B,","\ndelta512-B,"))
for d,name in (("student","delta"),("student1","deltanet")):
    a0=[json.loads(l) for l in open(O/d/"A0-metrics.jsonl")]
    print(d,[ (r["step"],r.get("stage"),r["tokens"],round(r.get("seconds",0)),r.get("held_out_loss"),r.get("gap"),r.get("teacher_loss")) for r in a0 if "held_out_loss" in r], list(a0[-1]))
    last=a0[-1]
    for job,ph in (("B","A"),("C","B")):
        rows=rd(O/d/f"bench-{job}.csv"); out=[]
        for r in rows:
            r["run"]=f"{name}-{ph}"
            if r["commit"] in ("","unknown"): r["commit"]="605dea3406d1"
        if ph=="A":
            ev=[r for r in a0 if "gap" in r]
            lay=[r for r in ev if r.get("stage") in (1,"layers")]
            base={k:rows[0][k] for k in ("run","layers","kind","processor","torch","commit")}
            for r in (lay[-1:] or []):
                out.append(base|{"step":r["step"],"stage":1,"tokens":r["tokens"],"seconds":r["seconds"],"held_out_loss":r["held_out_loss"],"teacher_loss":r["held_out_loss"]-r["gap"],"gap":r["gap"]})
            for r in rows:
                if r["kind"]=="stage":
                    r["step"]=int(r["step"])+last["step"]; r["tokens"]=int(r["tokens"])+last["tokens"]; r["seconds"]=float(r["seconds"])+last["seconds"]
        wr(R/f"smollm2-{name}-{ph}.csv", out+rows)
def add(file, src, name):
    rows=rd(R/file); new=rd(src)
    for r in new: r["model"]=name
    wr(R/file, rows+new)
for d,name in (("student","delta"),("student1","deltanet")):
    for f in sorted((O/d).glob("passkeys*.csv")):
        add("passkeys.csv", f, name+("-A" if f.stem.endswith("-B") else "-B"))
    for f in sorted((O/d).glob("needles*.csv")):
        add("needles.csv", f, name+("-A" if f.stem.endswith("-B") else "-B"))
