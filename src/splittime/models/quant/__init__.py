"""Weights kept in fewer bits: which weights in which scheme (`plan`), and how far a product may be off (`bounds`).

The rounding itself and the product are kernels' business: `kernels.reference.rounding`, and st_pack and st_linear.
"""
