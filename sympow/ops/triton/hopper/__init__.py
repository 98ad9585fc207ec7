"""The kernels for Hopper, in Gluon: layouts, copies and the tensor cores' products under control."""
