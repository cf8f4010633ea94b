"""The rules of the doctor, a file for each theme. A rule reads closed books and returns a finding, or None."""
