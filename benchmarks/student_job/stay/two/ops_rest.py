"""The mode forward+backward of benchmarks.ops"""
import benchmarks.ops as o
measure = o.measure
o.measure = lambda cases, device, impl, mode, peers: iter(()) if mode == "forward" else measure(cases, device, impl, mode, peers)
o.cold_start = lambda case: None
o.main()
