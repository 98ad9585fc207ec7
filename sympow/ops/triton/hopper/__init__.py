"""The kernels for Hopper, in Gluon, which sets layouts, copies and products of the tensor cores explicitly."""
