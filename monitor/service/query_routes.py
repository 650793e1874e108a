"""One HTTP route for each question of kvscope.monitor.query, derived from its signature."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, get_args, get_type_hints

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse

from kvscope.monitor.errors import BadQuestion, BadTime, NotKnown, Unreachable
from kvscope.monitor.json_names import encode_answer, schema_with_old_names
from kvscope.monitor.query import QUESTIONS, Query, Question
from kvscope.monitor.schema import SCHEMA_VERSION
from kvscope.monitor.service.csv_answers import csv_of

MAX_LIMIT: Final = 10_000
"""The most that `limit` allows. A larger one is lowered, one below 1 is raised."""
FORMATS: Final = ("json", "csv")
SCHEMA_HEADER: Final = "x-kvscope-schema"
"""The header that carries SCHEMA_VERSION."""


def serve_questions(app: FastAPI, query: Query) -> None:
    """Add the route of each question, and its old route where it had another name."""

    @app.exception_handler(NotKnown)
    async def not_known(_request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 404, headers={"x-kvscope": "not-known"})

    @app.exception_handler(BadQuestion)
    async def bad_question(_request: Request, error: Exception) -> Response:
        kind = "bad-time" if isinstance(error, BadTime) else "bad-question"
        return JSONResponse({"detail": str(error)}, 400, headers={"x-kvscope": kind})

    @app.exception_handler(msgspec.ValidationError)
    async def bad_parameter(_request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 422)

    @app.exception_handler(Unreachable)
    async def unreachable(_request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 504, headers={"x-kvscope": "unreachable"})

    for question in QUESTIONS.values():
        _add_route(app, query, question, question.route)
        if question.old_name:
            _add_route(app, query, question, question.old_route, deprecated=True)


def _add_route(app: FastAPI, query: Query, question: Question, path: str, deprecated: bool = False) -> None:
    async def endpoint(request: Request) -> Response:
        arguments = arguments_of(question, request.query_params)
        as_csv = _is_csv(request.query_params)
        # In a thread, since the answer may wait for the ledger.
        answer = await asyncio.to_thread(query.answer, question, arguments)
        headers = {SCHEMA_HEADER: SCHEMA_VERSION}
        if as_csv:
            headers["content-disposition"] = f'attachment; filename="kvscope-{question.name}.csv"'
            return Response(await asyncio.to_thread(csv_of, answer), media_type="text/csv", headers=headers)
        return Response(encode_answer(answer), media_type="application/json", headers=headers)

    summary, _, text = question.text.partition("\n")
    app.add_api_route(
        path,
        endpoint,
        methods=["GET"],
        name=path.rpartition("/")[2],
        summary=summary,
        description=f"Use {question.route} instead." if deprecated else text.strip() or summary,
        deprecated=deprecated,
        response_class=Response,
        openapi_extra={"parameters": list(_parameters(question)), "responses": _responses(question)},
    )


def _is_csv(given: QueryParams) -> bool:
    """Whether the answer is to be CSV. Raises BadQuestion for a format that is neither."""
    wanted = given.get("format", FORMATS[0])
    if wanted not in FORMATS:
        raise BadQuestion(f"format={wanted} is not {' or '.join(FORMATS)}")
    return wanted == "csv"


def arguments_of(question: Question, given: QueryParams | Mapping[str, str]) -> dict[str, Any]:
    """Read the arguments of a question from a query string.

    Raises msgspec.ValidationError for what is missing or of another type, and BadQuestion for a value that is not one
    of a closed list.
    """
    texts: dict[str, Any] = {}
    types = get_type_hints(question.parameters)
    for field in msgspec.structs.fields(question.parameters):
        text = given.get(field.name, given.get(question.old_parameters.get(field.name, ""), ""))
        if not text:
            continue
        choices = choices_of(types[field.name])
        if choices and text not in choices:
            raise BadQuestion(f"{field.name}={text} is not {', '.join(choices[:-1])} or {choices[-1]}")
        is_list = types[field.name] not in (str, int, float) and not choices and _is_sequence(types[field.name])
        texts[field.name] = [each for each in text.split(",") if each] if is_list else text
    read = msgspec.convert(texts, question.parameters, strict=False)
    arguments = msgspec.structs.asdict(read)
    if "limit" in arguments:
        arguments["limit"] = max(1, min(arguments["limit"], MAX_LIMIT))
    return arguments


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the texts that a Literal, or an optional one, allows, or none for any other type."""
    found: list[str] = []
    for each in get_args(annotation):
        found += [each] if isinstance(each, str) else choices_of(each)
    return tuple(found)


def _is_sequence(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is not None and get_args(annotation) == (str,)


def _parameters(question: Question) -> list[dict[str, Any]]:
    """Describe the parameters of a question as OpenAPI does."""
    types = get_type_hints(question.parameters)
    described = []
    for field in msgspec.structs.fields(question.parameters):
        schema = msgspec.json.schema(types[field.name])
        entry = {"name": field.name, "in": "query", "required": field.required, "schema": schema}
        if _is_sequence(types[field.name]):
            entry |= {"style": "form", "explode": False}
        described.append(entry)
        old = question.old_parameters.get(field.name)
        if old:
            described.append({**entry, "name": old, "required": False, "deprecated": True})
    described.append({"name": "format", "in": "query", "required": False, "schema": {"enum": list(FORMATS)}})
    return described


def _responses(question: Question) -> dict[str, Any]:
    detail = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
    refusal = {"content": {"application/json": {"schema": detail}}}
    (schema,), _ = schema_with_old_names([question.answer])
    return {
        "200": {"description": "The answer.", "content": {"application/json": {"schema": schema}}},
        "400": {"description": "The question is invalid."} | refusal,
        "404": {"description": "Not known, or not kept."} | refusal,
        "422": {"description": "A parameter is missing or has the wrong type."} | refusal,
        "504": {"description": "On a hub: the agent that owns the engine does not answer."} | refusal,
    }


def describe_answers(app: FastAPI) -> None:
    """Put the schemas of all answers into the app's OpenAPI document."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        _, components = schema_with_old_names([question.answer for question in QUESTIONS.values()])
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
