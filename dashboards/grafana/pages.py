"""All the pages, by name, and how each is written down."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from . import engine_page, findings_page, fleet_page, kv_cache_page, requests_page, vllm_page

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
        "textFormat": "its values may be inexact until its next complete audit",
        "step": "15s",
    },
    "vLLM restarts": {"titleFormat": "{{model_name}} started", "textFormat": "{{instance}}", "step": "15s"},
    "vLLM configuration changes": {
        "titleFormat": "{{instance}} is configured",
        "textFormat": "{{num_gpu_blocks}} blocks of {{block_size}}, gpu_memory_utilization {{gpu_memory_utilization}}",
        "step": "15s",
    },
    "Findings of kvscope": {"titleFormat": "{{code}}", "textFormat": "{{severity}} on {{engine}}", "step": "15s"},
}
"""The formats of each annotation."""
GENERATED_PAGES: Final = Path(__file__).parent / "generated"
PAGES_OF_CHART: Final = Path(__file__).parents[2] / "deploy" / "helm" / "kvscope" / "files" / "dashboards"
"""The same: a chart reads only files of its own, and a link to them would be lost in an archive."""
PAGES: Final[dict[str, Callable[[], Dashboard]]] = {
    "fleet": fleet_page.fleet_page,
    "engine": engine_page.engine_page,
    "kv-cache": kv_cache_page.kv_cache_page,
    "requests": requests_page.requests_page,
    "findings": findings_page.findings_page,
    "vllm": vllm_page.vllm_page,
}


PANEL_IDS: Final = 1_000_000


def panel_id(title: str) -> int:
    """Return the id in links to a panel. It depends on the title alone, so that links outlive other panels."""
    return 1 + zlib.crc32(title.encode()) % PANEL_IDS


def as_json(name: str) -> str:
    """Return a page as Grafana reads it, the same for the same code."""
    text = json.dumps(PAGES[name]().build(), cls=JSONEncoder)
    page = json.loads(text)
    for annotation in page["annotations"].get("list", []):  # what the SDK has no words for
        annotation |= ANNOTATIONS[annotation["name"]]
    for panel in page["panels"]:
        panel["id"] = panel_id(panel["title"])
    return json.dumps(page, sort_keys=True, indent=2) + "\n"
