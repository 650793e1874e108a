"""One HTTP route for each question of query.py, by its signature. `format=csv` answers in CSV."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import Mapping
from typing import Any, Final, get_args, get_type_hints

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.datastructures import QueryParams
from starlette.responses import JSONResponse

from ..base.errors import BadQuestion, BadTime, NotKnown, Unreachable
from ..questions.query import QUESTIONS, Query, Question
from ..questions.schema import SCHEMA_VERSION

FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet computes a text that begins so. Ids come from clients."""


def csv_of(answer: Any) -> str:
    """Return the rows of an answer: of a list its entries, else those of its longest list, else the answer as one row.

    A column has its keys joined with dots. A list in a cell is JSON.
    """
    rows = [_cells(row) for row in _table_of(msgspec.to_builtins(answer))]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _table_of(answer: Any) -> list[dict[str, Any]]:
    if isinstance(answer, list):
        return [row if isinstance(row, dict) else {"value": row} for row in answer]
    tables = [value for value in answer.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return max(tables, key=len, default=[answer])


def _cells(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            cells |= _cells(value, f"{prefix}{name}.")
        else:
            cells[f"{prefix}{name}"] = _cell(value)
    return cells


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return json.dumps(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value


MAX_LIMIT: Final = 10_000
"""The most that `limit` allows. A larger one is lowered, one below 1 is raised."""
FORMATS: Final = ("json", "csv")
SCHEMA_HEADER: Final = "x-kvscope-schema"
"""The header that carries SCHEMA_VERSION."""
SCHEMA_REFERENCE: Final = "#/components/schemas/{name}"


def serve_questions(app: FastAPI, query: Query) -> None:
    """Add the route of each question."""

    answer_error(app, NotKnown, 404, "not-known")
    answer_error(app, BadTime, 400, "bad-time")
    answer_error(app, BadQuestion, 400, "bad-question")
    answer_error(app, msgspec.ValidationError, 422)
    answer_error(app, Unreachable, 504, "unreachable")
    for question in QUESTIONS.values():
        _add_route(app, query, question)


def answer_error(app: FastAPI, error: type[Exception], status: int, name: str = "") -> None:
    """Answer with this status, and with `name` in the header x-kvscope, where a route raises `error`."""

    async def answer(_request: Request, raised: Exception) -> Response:
        return JSONResponse({"detail": str(raised)}, status, headers={"x-kvscope": name} if name else None)

    app.add_exception_handler(error, answer)


def _add_route(app: FastAPI, query: Query, question: Question) -> None:
    async def endpoint(request: Request) -> Response:
        arguments = arguments_of(question, request.query_params)
        as_csv = _is_csv(request.query_params)
        # In a thread, since the answer may wait for the ledger.
        answer = await asyncio.to_thread(query.answer, question, arguments)
        headers = {SCHEMA_HEADER: SCHEMA_VERSION}
        if as_csv:
            headers["content-disposition"] = f'attachment; filename="kvscope-{question.name}.csv"'
            return Response(await asyncio.to_thread(csv_of, answer), media_type="text/csv", headers=headers)
        return Response(msgspec.json.encode(answer), media_type="application/json", headers=headers)

    summary, _, text = question.text.partition("\n")
    app.add_api_route(
        question.route,
        endpoint,
        methods=["GET"],
        name=question.name,
        summary=summary,
        description=text.strip() or summary,
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
        text = given.get(field.name, "")
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
    described.append({"name": "format", "in": "query", "required": False, "schema": {"enum": list(FORMATS)}})
    return described


def _responses(question: Question) -> dict[str, Any]:
    detail = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
    refusal = {"content": {"application/json": {"schema": detail}}}
    (schema,), _ = msgspec.json.schema_components([question.answer], ref_template=SCHEMA_REFERENCE)
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
        answers = [question.answer for question in QUESTIONS.values()]
        _, components = msgspec.json.schema_components(answers, ref_template=SCHEMA_REFERENCE)
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
