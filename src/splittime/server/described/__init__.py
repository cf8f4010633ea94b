"""The API as programs read it: `/openapi.json`, its paths, bodies and answers. The page at `/docs` shows it."""
