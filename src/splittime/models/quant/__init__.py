"""Weights kept in fewer bits: which weights in which scheme (`plan`). The rounding itself is the kernels' business."""
