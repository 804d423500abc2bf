"""Clients' mistakes and the service's own, as they are answered: in OpenAI's form, one line of the log each."""

import sys
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from training.reporting.sample_tables import visible

TYPES = {404: "not_found_error", 429: "rate_limit_error"}  # others: by whether it is the client's mistake
GONE = 499  # nobody reads it
SHOWN = 200  # characters of a path


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
    """What an error says: OpenAI's form."""
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

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        return answer(request, _of_validation(error))

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


def _of_validation(error: RequestValidationError) -> RequestError:
    """The first thing that is wrong with a body, in a sentence with the field's name."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return RequestError(400, f"the body is no JSON: {first['ctx']['error']}")
    place = [str(part) for part in first["loc"] if part != "body" and _is_field(part)]
    if not place and "input" in first and not isinstance(first["input"], dict):
        return RequestError(400, "the body is no JSON object. Send one, with Content-Type: application/json")
    name = ".".join(place)
    message = first["msg"].removeprefix("Value error, ")
    return RequestError(400, f"{name}: {message}" if name else message, param=place[0] if place else None)


def _is_field(part: str | int) -> bool:
    """Whether a part of a place names a field or an item, and no kind of value that pydantic has tried."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))
