"""The runner: carries out a `StepPlan` with torch. It owns tensors and weights; it knows no request, only rows."""
