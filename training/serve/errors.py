"""Clients' mistakes and the service's own, as they are answered: in OpenAI's form, one line of the log each."""

import sys
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from training.reporting.sample_tables import visible

TYPES = {404: "not_found_error", 429: "rate_limit_error"}  # others: by whether it is the client's mistake
GONE = 499  # nobody reads it
SHOWN = 200  # characters of a path, or a field's name
SAID = 2000  # characters of a message


class RequestError(Exception):
    """A request that is refused, or could not be answered.

    param: the field that is at fault, where one is. code: a word for programs. headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers


class ClientGone(Exception):
    """The client has closed its connection before it was answered."""


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict:
    """What an error says: OpenAI's form, cut where it repeats what a client has sent at length."""
    message, param = message[:SAID], param[:SHOWN] if param else param
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def say(where: str, status: int, message: str) -> None:
    """Write one line about a request that was not answered as asked."""
    print(f"{status} {visible(where[:SHOWN])}: {visible(message[:500])}", file=sys.stderr, flush=True)


def add_handlers(app: FastAPI) -> None:
    """Have the app answer every error in this form."""

    def answer(request: Request, error: RequestError) -> Response:
        say(f"{request.method} {request.url.path}", error.status, error.message)
        body = error_body(error.status, error.message, error.param, error.code)
        return JSONResponse(body, error.status, error.headers)

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return answer(request, error)

    @app.exception_handler(HTTPException)
    async def of_routing(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:SHOWN]
        told = {404: f"there is no {path} here", 405: f"{path} has no {request.method}"}
        message = told.get(error.status_code, str(error.detail))
        return answer(request, RequestError(error.status_code, message, headers=error.headers))

    @app.exception_handler(Exception)  # the service's own mistake, whose trace uvicorn logs
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(error_body(500, "the service failed; its own log says where"), 500)

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=GONE)
