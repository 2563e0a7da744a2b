"""Routes of the server."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from openv41.server.answers import ChatCompletion, Completion, ErrorBody, Model, Models
from openv41.server.backend import Backend, ServedModel
from openv41.server.errors import ApiError, as_api_error, error_response, validation_error
from openv41.server.gate import Gate
from openv41.server.guard import Guard
from openv41.server.image_loader import ImageLoader
from openv41.server.lifecycle import Lifecycle
from openv41.server.limits import Limits
from openv41.server.metrics import MEDIA_TYPE, Metrics
from openv41.server.schemas import FIELDS, ChatBody, CompletionBody
from openv41.server.streaming import Answering, Service

STATUSES = (400, 401, 404, 408, 413, 422, 429, 500, 503, 504)  # 422: replaces FastAPI's own entry
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in STATUSES}


def make_service(
    backend: Backend,
    model: ServedModel,
    *,
    limits: Limits,
    stats: Callable[[], object],
    images: ImageLoader | None = None,
) -> Service:
    """Put together what answers need; ``images`` None: images from data URLs alone."""
    gate = Gate(limits)
    return Service(
        backend=backend,
        model=model,
        limits=limits,
        gate=gate,
        lifecycle=Lifecycle(),
        metrics=Metrics(stats, gate),
        images=ImageLoader() if images is None else images,
    )


def make_app(service: Service, *, api_key: str | None = None) -> FastAPI:
    """Build the application; its life is the backend's."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.backend.start()
        try:
            yield
        finally:
            await service.backend.stop(drain=False)

    app = FastAPI(
        title="openv41",
        version=version("openv41"),
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    app.add_middleware(
        Guard,
        limits=service.limits,
        lifecycle=service.lifecycle,
        metrics=service.metrics,
        api_key=api_key,
    )
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(HTTPException, _refuse_route)
    app.add_exception_handler(ApiError, _fail)
    app.add_exception_handler(Exception, _fail)
    _add_answers(app, service)
    _add_state(app, service)
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses={200: {"model": Completion}, **ERRORS})
    async def completions(body: CompletionBody) -> Response:
        """Continue prompts."""
        return Answering(service, body, "/v1/completions")

    @app.post("/v1/chat/completions", responses={200: {"model": ChatCompletion}, **ERRORS})
    async def chat_completions(body: ChatBody) -> Response:
        """Answer a chat."""
        return Answering(service, body, "/v1/chat/completions")


def _add_state(app: FastAPI, service: Service) -> None:
    model = service.model
    card = Model(
        id=model.name,
        object="model",
        created=model.created,
        owned_by="openv41",
        max_model_len=model.max_length,
    )

    @app.get("/v1/models", responses={401: ERRORS[401], 503: ERRORS[503]})
    async def models() -> Models:
        """List the model."""
        return Models(object="list", data=[card])

    @app.get("/v1/models/{name:path}", responses={s: ERRORS[s] for s in (401, 404, 503)})
    async def model_card(name: str) -> Model:
        """Describe the model."""
        if name != model.name:
            text = f"this server has no model {name!r}; it serves {model.name!r}"
            raise ApiError(404, text, code="model_not_found", param="model")
        return card

    @app.get("/health", responses={503: ERRORS[503]})
    async def health() -> dict[str, str]:
        """Say whether new requests are taken."""
        if service.lifecycle.is_draining:
            raise ApiError(503, "the server is stopping; try another one", code="draining")
        if not service.backend.is_running:
            raise ApiError(503, "the engine has stopped; see the server's log", code="no_engine")
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(service.metrics.text(), media_type=MEDIA_TYPE)


async def _refuse_body(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), f"not a body's error: {error!r}"
    return error_response(validation_error(error.errors(), FIELDS))


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"not a route's error: {error!r}"
    texts = {
        404: f"there is nothing at {request.url.path!a}",
        405: f"{request.url.path} does not take {request.method}",
    }
    text = texts.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, text), error.headers)


async def _fail(_: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))
