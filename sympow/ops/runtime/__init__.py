"""What kernels run on: their launches, and their registration as PyTorch operators."""
