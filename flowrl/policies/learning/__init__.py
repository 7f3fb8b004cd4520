"""Optimization of a policy: gradients, flat parameters, accelerated kernels."""
