"""Which path is answered by what, and what is said of a path or a method that nothing answers."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from splittime.core.errors import NotFound, RequestError, SplittimeError
from splittime.web import http

Handler = Callable[[Any, http.Scope, http.Receive, http.Send], Awaitable[None]]


class PathTable:
    """paths: method, path and handler each. A name in braces stands for the rest of a path, or for what is before its
    end: `http.PATH_REST` in the scope. owner: what every handler is given first. hints: by path, for those that a
    client of another API asks for. listed_at: where all paths are listed."""

    def __init__(
        self, paths: Iterable[tuple[str, str, Handler]], owner: Any, hints: Mapping[str, str], listed_at: str
    ) -> None:
        self._owner, self._hints, self._listed_at = owner, hints, listed_at
        self._methods: dict[str, dict[str, Handler]] = {}  # by path; "HEAD" is answered as "GET"
        folders: dict[tuple[str, str], str] = {}
        for method, path, handler in paths:
            start, brace, rest = path.partition("{")
            end = rest.partition("}")[2]
            handlers = self._methods.setdefault(start + brace + end, {})
            handlers |= {method: handler} | ({"HEAD": handler} if method == "GET" else {})
            folders |= {(start, end): start + brace + end} if brace else {}
        self._folders = tuple(sorted(folders.items(), key=lambda each: -len(each[0][1])))

    async def answer(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        """Lead a request to its handler; what that raises for the client to know is answered here."""
        path, method = scope["path"], scope["method"]
        scope[http.PATH_REST] = ""  # also for "/folder/{", which is in the table as a folder
        handlers = self._methods.get(path)
        if handlers is None:
            for (start, end), name in self._folders:
                if path.startswith(start) and path.endswith(end):
                    handlers, scope[http.PATH_REST] = self._methods[name], path[len(start) : len(path) - len(end)]
                    break
        try:
            if handlers is None:
                hint = self._hints.get(path, f"{self._listed_at} lists all paths")
                raise NotFound(f"no such path: {path}", hint=hint)
            if method in handlers:
                await handlers[method](self._owner, scope, receive, send)
            else:
                await _refuse_method(scope, sorted(handlers), send)
        except SplittimeError as error:
            await http.respond_error(send, error)
        except http.Disconnected:
            pass


async def _refuse_method(scope: http.Scope, allowed: list[str], send: http.Send) -> None:
    listed, message = ", ".join(allowed), f"{scope['path']} is not for {scope['method']}"
    error = RequestError(message, code="method_not_allowed", status=405, value=scope["method"], hint=f"use {listed}")
    await http.respond_error(send, error, headers=[(b"allow", listed.encode())])
