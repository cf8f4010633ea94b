"""The page at `/`: `files` (what the browser loads), `bins` and `rows` (what it is told, made from closed books).

`..routes_dashboard` answers with them. The page itself is the `.html`, `.css` and `.js` beside this file: plain
modules, no build step, nothing fetched from elsewhere.
"""
