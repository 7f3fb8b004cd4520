"""Accelerated gradients of shipped losses, computed with numpy."""
