"""The page at `/`: `files` gives out what the browser loads, `..routes_dashboard` makes what it is told from closed
books.

The page itself is the `.html`, `.css` and `.js` beside this file: plain
modules, no build step, nothing fetched from elsewhere.
"""
