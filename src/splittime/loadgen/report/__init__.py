"""A run for people and for other programs: `table` for a terminal, `csv` for a spreadsheet, `html` as one page.

All are made from a saved run, with the figures of `ledger.client_figures`, and measure nothing themselves.
"""

from splittime.loadgen.report.csv import write_csv
from splittime.loadgen.report.table import COLUMNS, render

__all__ = ["COLUMNS", "render", "write_csv"]
