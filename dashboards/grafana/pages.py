"""All the pages, by name, and how each is written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from kvscope.dashboards.grafana import engine_page, findings_page, fleet_page, kv_cache_page, requests_page, vllm_page

ANNOTATIONS: Final = {
    "Findings": {"titleFormat": "{{code}}", "textFormat": "{{severity}} on {{engine}}", "step": "15s"},
    "Configuration changes": {
        "titleFormat": "{{engine}} is configured",
        "textFormat": "{{model}}, {{num_gpu_blocks}} blocks of {{block_size}}, {{max_num_seqs}} requests and"
        " {{max_num_batched_tokens}} tokens a step",
        "step": "15s",
    },
    "Figures inexact": {
        "titleFormat": "Events of {{engine}} were lost",
        "textFormat": "its figures are not sure until its next whole audit",
        "step": "15s",
    },
}
"""What each annotation is drawn with."""
GENERATED_PAGES: Final = Path(__file__).parent / "generated"
PAGES: Final[dict[str, Callable[[], Dashboard]]] = {
    "fleet": fleet_page.fleet_page,
    "engine": engine_page.engine_page,
    "kv-cache": kv_cache_page.kv_cache_page,
    "requests": requests_page.requests_page,
    "findings": findings_page.findings_page,
    "vllm": vllm_page.vllm_page,
}


def as_json(name: str) -> str:
    """A page as Grafana reads it, the same for the same code."""
    text = json.dumps(PAGES[name]().build(), cls=JSONEncoder)
    page = json.loads(text)
    for annotation in page["annotations"].get("list", []):  # what the SDK has no words for
        annotation |= ANNOTATIONS[annotation["name"]]
    return json.dumps(page, sort_keys=True, indent=2) + "\n"
