import re, textwrap
from pathlib import Path
def sub(file, old, new, count=1):
    p=Path(file); s=p.read_text()
    pat=r'\s+'.join(re.escape(w) for w in old.split())
    found=list(re.finditer(pat,s))
    assert len(found)==count, (file, old[:60], len(found))
    for m in reversed(found):
        # paragraph bounds: block of lines without blank, table, or start of another bullet
        a=s.rfind('\n\n',0,m.start())+2
        b=s.find('\n\n',m.end()); b=len(s) if b<0 else b
        block=s[a:b]; i,j=m.start()-a,m.end()-a
        # narrow to one bullet
        starts=[x.start() for x in re.finditer(r'(?m)^(- |\d+\. )',block)]
        lo=max([x for x in starts if x<=i],default=0); hi=min([x for x in starts if x>j],default=len(block))
        if not starts or lo==0 and starts[0]!=0 and i<starts[0]: lo=0
        part=block[lo:hi]; i-=lo; j-=lo
        tail='\n' if part.endswith('\n') else ''
        t=part[:i]+new+part[j:]
        if t.lstrip().startswith('|'):
            w=t
        else:
            bullet=re.match(r'- |\d+\. ',t); ind=' '*len(bullet.group()) if bullet else ''
            w=textwrap.fill(' '.join(t.split()),width=100,subsequent_indent=ind,break_long_words=False,break_on_hyphens=False)+tail
        s=s[:a+lo]+w+s[a+hi:]
    p.write_text(s)
