"""Accelerated gradients: numpy kernels for shipped losses on small fully connected networks.

A kernel computes the loss that a policy states in torch, and its gradient, without autograd.
`registry.find_kernel` selects it only for exactly that loss. The setting `numpy_gradients=False`
switches all of them off, which changes results only by rounding; tests check both.
"""
