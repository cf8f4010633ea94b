"""The API as others read it: `/openapi.json` (its paths, bodies and answers) and the page at `/docs`."""
