"""Power attention in Triton, for NVIDIA GPUs from Ampere on and AMD GPUs; `adapt.py` is its entrance."""
