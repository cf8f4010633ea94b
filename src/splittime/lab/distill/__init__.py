"""Distillation: a smaller model that learns from a larger one with the same vocabulary.

    text, the teacher's own outputs -> windows -> teacher's logits, student's logits -> loss -> update -> checkpoint

The parts that plain training needs as well (`llama`, `trainer`) are what the scripts in
`training/` train the packaged models with.
"""
