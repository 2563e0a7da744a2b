"""Models, health, metrics, and the schema."""

from dataclasses import fields

from prometheus_client.parser import text_string_to_metric_families

from openv41.engine.stats import EngineStats
from openv41.server.metrics import FIGURES


def figures(server):
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_models(client, server):
    assert [model.id for model in client.models.list()] == ["echo"]
    model = client.models.retrieve("echo")
    assert (model.object, model.owned_by, model.created) == ("model", "openv41", 1)
    assert server.get("/v1/models/echo").json()["max_model_len"] == 512


def test_health(server):
    answer = server.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_health_tells_of_an_engine_that_failed(server):
    server.backend.is_stopped = True
    try:
        answer = server.get("/health")
    finally:
        server.backend.is_stopped = False
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_engine"


def test_figures_of_the_engine(server):
    found = figures(server)
    pages = [found[f"openv41_pages_{kind}",] for kind in ("used", "free", "cached")]
    assert pages == [3, 5, 2]
    assert found["openv41_prefill_rows_skipped_total",] == 14
    assert found["openv41_prefix_hit_tokens_total",] == 12
    assert found["openv41_engram_stalls_total",] == 19
    assert found["openv41_running",] == 0
    assert found["openv41_draft_rounds_total",] == 23
    assert found["openv41_draft_budget",] == 3
    assert found["openv41_draft_acceptance", "2"] == 0.25
    assert found["openv41_drafts_accepted_total", "2"] == 8
    names = {name for name, *_ in found}
    for figure in FIGURES:
        suffix = "_total" if figure.kind == "counter" else ""
        assert f"openv41_{figure.name}{suffix}" in names


def test_every_figure_of_the_engine_is_shown():
    derived = {name for name, value in vars(EngineStats).items() if isinstance(value, property)}
    known = {field.name for field in fields(EngineStats)} | derived
    assert {figure.name for figure in FIGURES} == known


def test_figures_of_requests(server):
    before = figures(server)
    server.post("/v1/completions", json={"prompt": "abc", "n": 2})
    server.post("/v1/completions", json={"prompt": "abc", "max_tokens": 10_000})
    after = figures(server)

    def grew(*key):
        return after[key] - before.get(key, 0)

    assert grew("openv41_time_to_first_token_seconds_count") == 2
    assert grew("openv41_http_request_seconds_count") == 2
    assert grew("openv41_http_requests_total", "/v1/completions", "200") == 1
    assert grew("openv41_http_requests_total", "/v1/completions", "400") == 1
    assert after["openv41_http_waiting",] == 0


def counts(server):
    prefix = "openv41_http_requests_total"
    return {key[1:]: value for key, value in figures(server).items() if key[0] == prefix}


def test_every_end_is_counted(start):
    server = start(max_body_bytes=1000)
    for body in ({"prompt": "a"}, {"prompt": "a", "max_tokens": 0}, {"prompt": "a", "top_p": 2}):
        server.post("/v1/completions", json=body)
    server.post("/v1/completions", json={"prompt": "!error", "stream": True})
    server.post("/v1/completions", json={"prompt": "a" * 1500})
    server.post("/v1/chat/completions", content="{")
    server.get("/v1/models/none")
    server.get("/v1/made/up")
    assert counts(server) == {
        ("/v1/completions", "200"): 1,
        ("/v1/completions", "400"): 2,
        ("/v1/completions", "500"): 1,  # it had begun with a 200
        ("/v1/completions", "413"): 1,
        ("/v1/chat/completions", "400"): 1,
        ("/v1/models", "404"): 1,
        ("other", "404"): 1,
    }


def test_refusals_of_the_guard_are_counted(start):
    server = start(api_key="secret")
    server.get("/v1/models")
    server.get("/v1/models", headers={"authorization": "Bearer secret"})
    server.service.lifecycle.is_draining = True
    server.post("/v1/completions", json={"prompt": "a"})
    assert counts(server) == {
        ("/v1/models", "401"): 1,
        ("/v1/models", "200"): 1,
        ("/v1/completions", "503"): 1,
    }


def test_clients_that_leave_are_counted(start):
    server = start()
    with server.openai() as client:
        stream = client.completions.create(model="echo", prompt="!hang", stream=True)
        next(iter(stream))
        stream.close()
    server.wait_for(lambda: counts(server) == {("/v1/completions", "left"): 1})


def test_the_schema_names_every_route(server):
    schema = server.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/health",
        "/metrics",
    }
    assert server.get("/docs").status_code == 404  # it would load scripts from elsewhere
