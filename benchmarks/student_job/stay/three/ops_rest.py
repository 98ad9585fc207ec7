"""The mode forward+backward of benchmarks.ops, of the shapes that are stale"""
import benchmarks.ops as o
measure = o.measure
o.CASES["cuda"][:] = o.CASES["cuda"][9:]
o.measure = lambda cases, device, impl, mode, peers: iter(()) if mode == "forward" else measure(cases, device, impl, mode, peers)
o.cold_start = lambda case: None
o.main()
