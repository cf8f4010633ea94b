"""Statistics that several parts share: intervals, dependence between samples, paired tests, saturation."""
